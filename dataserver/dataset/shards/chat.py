"""Conversations as chat templates take them: messages and tools, as the index of a chat dataset holds them.

Turns are read as LLaVA and ShareGPT write them, {"from": ..., "value": ...}, or as chat messages of OpenAI and the Hub,
{"role": ..., "content": ...}. What becomes of them has one form: roles are `system`, `developer`, `user`, `assistant`
and `tool`, a content is a text, or a list of parts of the types `text`, `image`, `audio` and `video` where it has
images, clips or videos, and the arguments of tool calls are objects. Nothing is rendered here: that needs the template
of a tokenizer.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from dataserver.dataset.errors import SampleError
from dataserver.dataset.kinds import BAD_CONVERSATION
from dataserver.dataset.shards.conversations import IMAGE_KIND, MEDIA_NAMES, kind_of_part
from dataserver.dataset.shards.members import BYTE_ORDER_MARK

MAX_TURNS: Final = 4096
MAX_DEPTH: Final = 64
"""Objects and lists in each other, in tools and arguments: templates print them, and code that does calls itself."""
ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "developer",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""What roles are called in files, and in messages."""
_CALLING: Final = "function_call"
"""Role of ShareGPT's turns whose text is a call, as JSON."""
_TEXT: Final = "text"
"""Type of the parts that are texts."""
_PASSED_ON: Final = ("name", "tool_call_id", "reasoning_content")
"""Texts of a turn that templates may print, as they are."""


class Conversation(NamedTuple):
    """What a chat template is given."""

    messages: list[dict[str, Any]]
    tools: list[Any]

    def to_json(self) -> str:
        """What an index holds of it; the order of entries stays, since templates print it."""
        return json.dumps([self.messages, self.tools], ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Conversation":
        """The reverse. Raises ValueError where that is no conversation."""
        found = json.loads(text)
        if not (isinstance(found, list) and len(found) == 2 and all(isinstance(part, list) for part in found)):
            raise ValueError("it is no list of messages and tools")
        return cls(*found)

    @property
    def media(self) -> list[str]:
        """The parts of messages that are no texts, in order: `image`, `audio` or `video`."""
        contents = (message.get("content") for message in self.messages)
        parts = (part for content in contents if isinstance(content, list) for part in content)
        return [part["type"] for part in parts if part["type"] != _TEXT]

    def document(self, images: Sequence[str]) -> tuple[list[str | None], list[str | None]]:
        """Return the parallel lists `texts` and `images` of a document that says the same, as people read it.

        Args:
            images: names of its images, clips and videos, in order.
        """
        parts: list[str | None] = []  # None stands for an image, a clip or a video
        for number, message in enumerate(self.messages):
            content = message["content"]
            text = f"{chr(10) if number else ''}{message['role']}: "
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                if part["type"] != _TEXT:
                    parts += [text, None]
                    text = ""
                else:
                    text += part["text"]
            for call in message.get("tool_calls", ()):
                text += json.dumps(call["function"], ensure_ascii=False)
            parts.append(text)
        left = iter(images)
        joined: list[str | None] = []
        for part in parts:
            if part is not None and joined and joined[-1] is not None:
                joined[-1] += part
            elif part != "":
                joined.append(part)
        return joined, [next(left) if part is None else None for part in joined]


def read_conversation(
    document: Mapping[str, Any], turns: Sequence[Any], num_images: int, others: Mapping[str, int] | None = None
) -> Conversation:
    """Return the conversation of a document.

    Args:
        document: with `system` and `tools` as ShareGPT has them, where it has any.
        turns: its turns.
        num_images: of the sample. Without a mark or part for any of them, they go before the text of the first user.
        others: its clips and videos in the same way, by kind: `audio`, `video`. What goes before that text comes in
            this order: images, clips, videos. Without the kind `audio`, `<audio>` is text, and so on.

    Raises:
        SampleError: a turn cannot be used, nobody answers, or there are other numbers of placeholders and of images,
            clips or videos.
    """
    counts = {IMAGE_KIND: num_images, **(others or {})}
    if len(turns) > MAX_TURNS:
        raise SampleError("too_many_members", f"{len(turns)} turns, limit {MAX_TURNS}")
    messages = [_message(number, turn, counts) for number, turn in enumerate(turns)]
    if isinstance(system := document.get("system"), str) and system.strip():
        messages.insert(0, {"role": "system", "content": system})
    found = Conversation(messages, _tools(document.get("tools")))
    _check_depth(found)
    _check_answers(messages)
    marks, unmarked = Counter(found.media), list[dict[str, str]]()
    first = next((message for message in messages if message["role"] == "user"), None)
    for kind, number in counts.items():
        if marks[kind] == number:
            continue
        if marks[kind] or first is None:
            raise _bad(
                f"{marks[kind]} placeholders in the turns and {number} {MEDIA_NAMES[kind]}; write one <{kind}>, or one "
                f"part of the type {kind}, for each of them that the sample has"
            )
        unmarked += [{"type": kind} for _ in range(number)]
    if unmarked and first is not None:
        content = first["content"]
        first["content"] = unmarked + ([{"type": _TEXT, "text": content}] if isinstance(content, str) else content)
    return found


def _check_depth(found: Conversation) -> None:
    level: list[Any] = [*found]
    for _ in range(MAX_DEPTH):
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [part for values in inner for part in values if isinstance(part, dict | list)]
    if level:
        raise _bad(f"its tools or calls hold more than {MAX_DEPTH} objects and lists in each other")


def _check_answers(messages: Sequence[Mapping[str, Any]]) -> None:
    answers = [message for message in messages if message["role"] == "assistant" and "weight" not in message]
    if not any(message.get("tool_calls") or _has_text(message["content"]) for message in answers):
        roles = sorted({str(message["role"]) for message in messages})
        raise _bad(f"no turn of an assistant has any text, the roles are {roles}; there is nothing to learn from it")


def _has_text(content: str | Sequence[Mapping[str, str]]) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return any(part.get("text", "").strip() for part in content)


def _message(number: int, turn: Any, media: Collection[str]) -> dict[str, Any]:
    """One message; entries that are null, as columns of structures have them, count as absent."""
    if not isinstance(turn, dict):
        raise _bad(f"turn {number} is a {type(turn).__name__}, no object")
    name = turn.get("from") or turn.get("role")
    if not isinstance(name, str) or name not in ROLES:
        raise _bad(f"turn {number} has the role {str(name)[:40]!a}; one of {sorted(ROLES)} is required")
    content = next((turn[entry] for entry in ("value", "content") if turn.get(entry) is not None), None)
    calls = turn.get("tool_calls")
    if name == _CALLING:
        calls, content = [{"function": _parsed(number, content)}], None
    message: dict[str, Any] = {"role": ROLES[name], "content": _content(number, content, bool(calls), media)}
    if calls:
        message["tool_calls"] = _calls(number, calls)
    for entry in _PASSED_ON:
        if isinstance(turn.get(entry), str):
            message[entry] = turn[entry]
    if message["role"] == "assistant" and (weight := turn.get("weight")) is not None:
        if weight not in (0, 1):
            raise _bad(f"turn {number} has the weight {str(weight)[:40]}; 0, which is not learned, or 1 is required")
        if weight == 0:
            message["weight"] = 0
    return message


def _content(number: int, given: Any, is_call: bool, media: Collection[str]) -> str | list[dict[str, str]]:
    """The content of a message: a text, or parts where it has images, clips or videos."""
    if given is None and is_call:
        return ""
    if not isinstance(given, str | list):
        raise _bad(f"turn {number} has no text: value or content is required")
    parts: list[dict[str, str]] = []
    for part in [given] if isinstance(given, str) else given:
        parts += _parts(number, part, media)
    if any(part["type"] != _TEXT for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _parts(number: int, part: Any, media: Collection[str]) -> list[dict[str, str]]:
    """A part of a content as texts and `media`. A line break between a mark and a text is not taken for text: templates
    write their own."""
    given = part.get("type", _TEXT) if isinstance(part, dict) else _TEXT
    if (kind := kind_of_part(given)) in media:
        return [{"type": kind}]
    text = part.get("text") if isinstance(part, dict) else part
    if given != _TEXT or not isinstance(text, str):
        why = f": the sample has no {MEDIA_NAMES[kind]} that are served (--{kind} serve)" if kind else ""
        raise _bad(
            f"turn {number} has a part of the type {str(given)[:40]!a}; {' or '.join([_TEXT, *media])} is required{why}"
        )
    pieces = re.split(f"<({'|'.join(media)})>", text.removeprefix(BYTE_ORDER_MARK))  # texts, and kinds between them
    found: list[dict[str, str]] = []
    for at, piece in enumerate(pieces):
        if at % 2:
            found.append({"type": piece})
            continue
        if at:
            piece = piece.removeprefix("\n")
        if at + 1 < len(pieces):
            piece = piece.removesuffix("\n")
        if piece or len(pieces) == 1:
            found.append({"type": _TEXT, "text": piece})
    return found


def _calls(number: int, given: Any) -> list[dict[str, Any]]:
    """Tool calls, with their arguments as objects: OpenAI has them as JSON in a text, and templates print them."""
    found = []
    for call in given if isinstance(given, list) else [None]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad(f"turn {number} has a tool call without a name; a list of {{function: {{name, arguments}}}}")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parsed(number, arguments)
        if not isinstance(arguments, dict):
            raise _bad(f"turn {number} calls {function['name'][:40]!a} with arguments that are no object")
        one: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        found.append({"id": call["id"], **one} if isinstance(call.get("id"), str) else one)
    return found


def _tools(given: Any) -> list[Any]:
    """The tools of a conversation, a list or its JSON."""
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else []
        except (ValueError, RecursionError) as error:
            raise _bad(f"tools is a text that is no JSON ({error})") from error
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise _bad("tools is no list of objects, or JSON of one")
    return given


def _parsed(number: int, text: Any) -> Any:
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _bad(f"turn {number} has a call that is no JSON object")
    return found


def _bad(detail: str) -> SampleError:
    return SampleError(BAD_CONVERSATION, detail)
