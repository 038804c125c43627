"""Conversations as files have them, and the one form that templates get."""

import json
from typing import Any

import pytest

from dataserver.dataset.errors import SampleError
from dataserver.dataset.shards.chat import Conversation, read_conversation

HI, HO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
IMAGE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("turns", "num_images", "messages"),
    [
        ([{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}], 0, [HI, HO]),
        ([{"role": "user", "content": [text("h"), "i"]}, HO], 0, [HI, HO]),
        ([{"from": "human", "value": "<image>\nhi"}, HO], 1, [{**HI, "content": [IMAGE, text("hi")]}, HO]),
        (
            [{"from": "human", "value": "a\n<image>\n\nb"}, HO],
            1,
            [{**HI, "content": [text("a"), IMAGE, text("\nb")]}, HO],
        ),
        (
            [{**HI, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, HO],
            1,
            [{**HI, "content": [IMAGE]}, HO],
        ),
        ([HI, HO, HI, HO], 2, [{**HI, "content": [IMAGE, IMAGE, text("hi")]}, HO, HI, HO]),
        ([{**HI, "tool_calls": None, "name": None, "weight": 1}, {**HO, "name": "x"}], 0, [HI, {**HO, "name": "x"}]),
    ],
)
def test_turns_become_messages(turns: list[Any], num_images: int, messages: list[Any]) -> None:
    found = read_conversation({}, turns, num_images)
    assert found.messages == messages
    assert found.media == ["image"] * num_images
    assert Conversation.from_json(found.to_json()) == found


def test_clips_and_videos_have_places_of_their_own() -> None:
    turns = [
        {"from": "human", "value": "<video>\nor <audio> or\n<image>"},
        HO,
        {**HI, "content": [{"type": "video_url"}]},
    ]
    found = read_conversation({}, turns, 1, {"audio": 1, "video": 2})
    video, audio = {"type": "video"}, {"type": "audio"}
    first = [video, text("or "), audio, text(" or"), IMAGE]
    assert found.messages == [{**HI, "content": first}, HO, {**HI, "content": [video]}]
    assert found.media == ["video", "audio", "image", "video"]
    unmarked = read_conversation({}, [{**HI, "content": "<image>"}, HO], 1, {"audio": 1, "video": 2})
    assert unmarked.messages[0]["content"] == [audio, video, video, IMAGE]
    plain = read_conversation({}, [{**HI, "content": "<audio>"}, HO], 0, {"video": 0})
    assert plain.messages[0]["content"] == "<audio>"
    with pytest.raises(SampleError, match="1 placeholders in the turns and 2 clips; write one <audio>, or one part"):
        read_conversation({}, [{**HI, "content": "<audio>"}, HO], 0, {"audio": 2})
    with pytest.raises(SampleError, match="1 placeholders in the turns and 0 clips"):
        read_conversation({}, [{**HI, "content": "<audio>"}, HO], 0, {"audio": 0})


def test_system_tools_and_calls() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2]}'}}
    shared = {"system": "be brief", "tools": json.dumps([{"name": "f"}])}
    given = [HI, {"from": "function_call", "value": '{"name": "f", "arguments": {"x": null}}'}]
    given += [{"from": "observation", "value": "3"}, {"role": "assistant", "tool_calls": [call]}]
    found = read_conversation(shared, given, 0)
    assert found.tools == [{"name": "f"}]
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    first, second = (message["tool_calls"][0] for message in found.messages if "tool_calls" in message)
    assert first == {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
    assert second == {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": [2]}}}
    assert list(second["function"]["arguments"]) == ["b", "a"], "templates print them in this order"


@pytest.mark.parametrize(
    ("turns", "num_images", "message"),
    [
        ([HI], 0, r"no turn of an assistant has any text, the roles are \['user'\]"),
        ([HI, {"from": "gpt", "value": " "}], 0, "no turn of an assistant has any text"),
        ([{**HI, "content": "<image>"}, HO], 0, "1 placeholders in the turns and 0 images; write one <image>"),
        ([{**HI, "content": "<image>"}, HO], 2, "1 placeholders in the turns and 2 images"),
        ([HO], 1, "0 placeholders in the turns and 1 images"),
        (["hi", HO], 0, "turn 0 is a str, no object"),
        ([{"from": "narrator", "value": "x"}, HO], 0, "turn 0 has the role 'narrator'; one of"),
        ([{"role": "user"}, HO], 0, "turn 0 has no text: value or content is required"),
        ([{**HI, "content": [{"type": "video"}]}, HO], 0, "turn 0 has a part of the type 'video'; text or image"),
        ([HI, {**HO, "tool_calls": [{"function": {"arguments": {}}}]}], 0, "turn 1 has a tool call without a name"),
        ([HI, {**HO, "tool_calls": [{"name": "f", "arguments": "{"}]}], 0, "turn 1 has a call that is no JSON object"),
        ([HI, HO] * 3000, 0, "6000 turns, limit 4096"),
    ],
)
def test_what_is_no_conversation_is_named(turns: list[Any], num_images: int, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        read_conversation({}, turns, num_images)


def test_tools_are_not_too_deep() -> None:
    deep: Any = 1
    for _ in range(900):
        deep = {"a": [deep]}
    with pytest.raises(SampleError, match="more than 64 objects and lists in each other"):
        read_conversation({"tools": [deep]}, [HI, HO], 0)


def test_tools_are_a_list() -> None:
    for tools in ("{", {"a": 1}, [1]):
        with pytest.raises(SampleError, match="tools is"):
            read_conversation({"tools": tools}, [HI, HO], 0)
