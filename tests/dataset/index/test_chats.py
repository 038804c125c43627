"""Conversations of files in an index, whatever their form."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.chats import write_chat_folder
from shards import make_image, write_tar

from dataserver.assembly import load_tokenizer, open_chat
from dataserver.dataset import (
    Conversations,
    Dataset,
    DatasetError,
    EncodedChat,
    IndexRules,
    MediaMembers,
    OnTokenError,
    TokenizingEndedError,
    TokensMissingError,
    build_index,
    count_chats,
    lint,
)
from dataserver.dataset.index.chat_counts import CHAT_COLUMN
from dataserver.dataset.index.chat_tokens import chat_key
from dataserver.dataset.index.format import BATCH_ROWS

PNG = make_image(np.random.default_rng(0), 8, 8)
WIDE = make_image(np.random.default_rng(0), 16, 8)
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "<image>"}'}}
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "from": None, "value": None},
    {"role": "assistant", "content": "ho"},
]


def index(path: Path) -> tuple[list[Any], dict[str, int]]:
    """The messages of each sample, and what was found."""
    report = build_index(path, workers=1, rules=IndexRules(conversations=Conversations.CHAT))
    (shard,) = Dataset.open(path, may_be_empty=True).shards
    return [json.loads(chat)[0] for chat in shard.column(CHAT_COLUMN).to_pylist()], dict(report.findings)


@pytest.mark.parametrize("form", ["tar", "manifest", "parquet"])
def test_calls_without_content_are_messages(tmp_path: Path, form: str) -> None:
    if form == "tar":
        write_tar(tmp_path / "0.tar", [("a.json", json.dumps({"messages": CALLING}).encode())])
    elif form == "manifest":
        (tmp_path / "data.jsonl").write_text(json.dumps({"messages": CALLING}))
    else:
        pq.write_table(pa.Table.from_pylist([{"messages": CALLING}]), tmp_path / "data.parquet", compression="none")
    (messages,), findings = index(tmp_path)
    assert not findings
    function = {"name": "look", "arguments": {"at": "<image>"}}
    assert messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "ho"},
    ]
    (shard,) = Dataset.open(tmp_path).shards
    assert shard.parts(0).texts == (
        'user: hi\nassistant: {"name": "look", "arguments": {"at": "<image>"}}\ntool: 3\nassistant: ho',
    )


def test_images_that_entries_name(tmp_path: Path) -> None:
    """An empty list names none, so that all images count, and so do as many names of other folders; of a list that
    names some, the others are told. What any other list names is not known."""
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    entries: dict[str, list[Any]] = {
        "a": [],
        "b": ["b.1.png"],
        "c": ["elsewhere/1.png", "elsewhere/2.png"],
        "d": ["1.png", "0.png"],
        "e": ["elsewhere/c.png"],
        "f": ["elsewhere/1.png", "elsewhere/2.png", 3],
        "g": ["g.0.png", "elsewhere/1.png"],
        "h": ["h.0.png", "h.2.png"],
    }
    members = []
    for key, images in entries.items():
        members += [(f"{key}.0.png", PNG), (f"{key}.1.png", WIDE)]
        members.append((f"{key}.json", json.dumps({"messages": said, "images": images}).encode()))
    write_tar(tmp_path / "0.tar", members)
    messages, findings = index(tmp_path)
    assert [str(found).count("'type': 'image'") for found in messages] == [2, 1, 2, 2]
    assert findings == {"unused_part": 1, "bad_conversation": 2, "missing_image": 2}
    (shard,) = Dataset.open(tmp_path).shards
    assert [[shard.image(row, n).width for n in range(count)] for row, count in enumerate((2, 1, 2, 2))] == [
        [8, 16],
        [16],
        [8, 16],
        [16, 8],
    ]
    details = {finding.key: (finding.kind, finding.detail) for finding in lint(tmp_path).findings}
    assert details.keys() == set("befgh")
    assert details["b"] == ("unused_part", "its entry images does not name .0.png; the conversation goes without")
    assert details["e"] == (
        "bad_conversation",
        "its entry images names 1 images, 'elsewhere/c.png' among them, and the tar holds 2 under its key, none of "
        "that name; name each as e.EXTENSION, or leave the entry out for all of them",
    )
    assert details["f"][0] == "missing_image"
    assert details["g"][0] == "bad_conversation"
    assert details["h"][0] == "missing_image"


@pytest.mark.parametrize("form", ["tar", "manifest", "parquet"])
def test_clips_go_where_their_marks_stand(tmp_path: Path, form: str) -> None:
    """Rows with clips and images: marks and parts of both kinds, of one kind, and of none."""
    pytest.importorskip("soundfile", reason="the extra audio is not installed")
    from audio.clips import clip

    files = {"0.flac": clip(0.1, "flac"), "1.flac": clip(0.2, "flac", seed=1), "2.png": PNG}
    answer = {"role": "assistant", "content": "ho"}
    parts = [{"type": "audio"}, {"type": "text", "text": "n"}, {"type": "image"}]
    users: list[Any] = ["<image>\nor <audio>?", "only <audio> here", "what?", "<image>"]
    users += [parts] if form == "manifest" else []
    rows = [{"messages": [{"role": "user", "content": user}, answer]} for user in users]
    media: list[dict[str, list[str]]] = [{"audio": ["1.flac"], "images": ["2.png"]} for _ in rows]
    media[2]["audio"], media[3]["audio"] = ["0.flac", "1.flac"], []
    folder = tmp_path / "d"
    folder.mkdir()
    if form == "manifest":
        for name, data in files.items():
            (folder / name).write_bytes(data)
        lines = [{**row, **{k: v for k, v in of.items() if v}} for row, of in zip(rows, media, strict=True)]
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    elif form == "parquet":
        columns = {
            name: pa.array([[{"bytes": files[one]} for one in of[name]] for of in media])
            for name in ("audio", "images")
        }
        pq.write_table(pa.table({**columns, "messages": [row["messages"] for row in rows]}), folder / "data.parquet")
    else:
        members = []
        for n, (row, of) in enumerate(zip(rows, media, strict=True)):
            members += [(f"{n}.{name}", files[name]) for name in (*of["images"], *of["audio"])]
            members.append((f"{n}.json", json.dumps(row).encode()))
        write_tar(folder / "0.tar", members)
    rules = IndexRules(conversations=Conversations.CHAT, audio=MediaMembers.SERVE)
    report = build_index(folder, workers=1, rules=rules)
    assert not report.findings
    (shard,) = Dataset.open(folder).shards
    offsets = shard.sizes().image_offsets
    found = []
    for row, chat in enumerate(shard.column(CHAT_COLUMN).to_pylist()):
        items = shard.images([(row, n) for n in range(int(offsets[row + 1] - offsets[row]))])
        kinds = [part["type"] for part in json.loads(chat)[0][0]["content"]]
        assert [ref.is_audio for ref in items] == [kind == "audio" for kind in kinds if kind != "text"]
        found.append(kinds)
    assert found[:4] == [
        ["image", "text", "audio", "text"],
        ["image", "text", "audio", "text"],
        ["image", "audio", "audio", "text"],
        ["image"],
    ]
    assert found[4:] == ([["audio", "text", "image"]] if form == "manifest" else [])


def test_entries_name_members_of_their_own_kind(tmp_path: Path) -> None:
    """A member of another kind, clips that are not there, and marks of these; names of other folders stand for all."""
    pytest.importorskip("soundfile", reason="the extra audio is not installed")
    from audio.clips import clip

    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    marked = [{"role": "user", "content": "<audio> what?"}, said[1]]
    files = {"a.png": PNG, "b.flac": clip(0.1, "flac")}
    chats: dict[str, tuple[list[Any], dict[str, list[str]], list[str]]] = {
        "p0": (said, {"images": ["p0.a.png", "p0.b.flac"]}, ["a.png", "b.flac"]),
        "p1": (said, {"audios": ["p1.a.png"]}, ["a.png", "b.flac"]),
        "p2": (marked, {}, []),
        "p3": (said, {"audios": ["p3.b.flac"]}, []),
        "p4": (said, {"audios": ["elsewhere/b.flac"]}, []),
        "p5": (said, {"audios": ["elsewhere/b.flac"]}, ["b.flac"]),
        "p6": (said, {"audios": ["p6.b.flac"], "images": ["p6.a.png"]}, ["a.png", "b.flac"]),
    }
    members = []
    for key, (messages, entries, names) in chats.items():
        members += [(f"{key}.{name}", files[name]) for name in names]
        members.append((f"{key}.json", json.dumps({"messages": messages, **entries}).encode()))
    write_tar(tmp_path / "0.tar", members)
    rules = IndexRules(conversations=Conversations.CHAT, audio=MediaMembers.SERVE)
    build_index(tmp_path, workers=1, rules=rules)
    assert Dataset.open(tmp_path).shards[0].keys() == ["p5", "p6"]
    findings = lint(tmp_path).findings
    assert [(finding.key, finding.kind) for finding in findings] == [
        ("p0", "bad_conversation"),
        ("p1", "bad_conversation"),
        ("p2", "bad_conversation"),
        ("p3", "missing_image"),
        ("p4", "missing_image"),
    ]
    assert findings[0].detail == (
        "its entry images names 'p0.b.flac', one of its clips; images alone are required: name it in audios"
    )
    assert "audios names 1 clips, 'elsewhere/b.flac' among them, and the tar holds 0" in findings[4].detail


class _Slow:
    """Takes too long for every conversation that says so."""

    name, digest, chat_digest, vocab_size = "slow", "1", "2", 9

    def begin_batch(self) -> None:
        """Nothing to forget."""

    def encode_chat(self, conversation: str) -> EncodedChat:
        """All ids are 1, the last one is learned."""
        if "slow" in conversation:
            raise TokenizingEndedError("the chat template takes more than 5 s")
        targets = np.array([False, False, True])
        return EncodedChat(np.ones(3, np.int32), targets, np.zeros(3, np.bool_), [3], [("chat_not_ended", "no end")])


def said(*texts: str) -> list[tuple[str, bytes]]:
    """Members of conversations."""
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": "ho"}] for text in texts]
    return [(f"{n}.json", json.dumps({"messages": found}).encode()) for n, found in enumerate(turns)]


def test_a_conversation_that_takes_too_long_is_named_or_left_out(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", said("fast", "slow", "fast"))
    rules = IndexRules(conversations=Conversations.CHAT)
    build_index(tmp_path, workers=1, rules=rules)
    with pytest.raises(DatasetError, match=r"0.tar, sample '1': tokenizer slow: .* 5 s; run .* --on-token-error skip"):
        count_chats(tmp_path, _Slow())
    assert not list(tmp_path.glob("*.tokens-*")), "which samples there are does not depend on the machine"
    build_index(tmp_path, workers=1, rules=replace(rules, on_token_error=OnTokenError.SKIP))
    report = count_chats(tmp_path, _Slow())
    assert (report.num_failed, dict(report.findings)) == (1, {"chat_error": 1, "chat_not_ended": 2})


@pytest.mark.parametrize("id_", [-1, 9])
def test_an_id_that_the_vocabulary_does_not_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, id_: int
) -> None:
    def encode_chat(self: _Slow, conversation: str) -> EncodedChat:
        return replace(encoded(self, conversation), ids=np.array([1, id_, 1], np.int32))

    encoded = _Slow.encode_chat
    monkeypatch.setattr(_Slow, "encode_chat", encode_chat)
    write_tar(tmp_path / "0.tar", said("fast"))
    build_index(tmp_path, workers=1, rules=IndexRules(conversations=Conversations.CHAT))
    with pytest.raises(DatasetError, match=r"sample '0': tokenizer slow gave an id outside 0\.\.8"):
        count_chats(tmp_path, _Slow())


def test_a_call_whose_end_no_template_writes_is_named(tmp_path: Path) -> None:
    """Other conversations of the template are learned."""
    folder = write_chat_folder(tmp_path / "qwen", "qwen2-vl")
    calls = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + calls + "\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": turns + prompt}))
    write_tar(tmp_path / "0.tar", [*said("hi"), ("calls.json", json.dumps({"messages": CALLING}).encode())])
    build_index(tmp_path, workers=1, rules=IndexRules(conversations=Conversations.CHAT))
    chat = open_chat(load_tokenizer("qwen", folder))
    report = count_chats(tmp_path, chat)
    chat.close()
    assert dict(report.findings) == {"chat_error": 1, "chat_not_ended": 1}
    findings = {finding.key: finding for finding in lint(tmp_path).findings}
    assert findings["calls"].kind == "chat_error"
    assert "writes no special token behind the tool calls of turn 1" in findings["calls"].detail


@pytest.mark.parametrize(
    "damage",
    [
        {"ends": pa.array([1], pa.int32())},
        {"ends": pa.array([[1]], pa.list_(pa.int32()))},
        {"images": pa.array(["1"])},
        {"targets": pa.array([[1]], pa.list_(pa.int32()))},
        {"targets": pa.array([4], pa.int32())},
    ],
)
def test_damaged_counts_are_missing_ones(tmp_path: Path, damage: dict[str, pa.Array]) -> None:
    write_tar(tmp_path / "0.tar", said("fast"))
    build_index(tmp_path, workers=1, rules=IndexRules(conversations=Conversations.CHAT))
    count_chats(tmp_path, _Slow())
    (path,) = (path for path in tmp_path.glob("*.tokens-*") if path.suffix != ".ids")
    table = pa.ipc.open_file(path.read_bytes()).read_all()
    columns = {**{name: table.column(name) for name in table.column_names}, **damage}
    damaged = pa.table(columns).replace_schema_metadata(table.schema.metadata)
    with pa.ipc.new_file(str(path), damaged.schema) as writer:
        writer.write_table(damaged)
    with pytest.raises(
        TokensMissingError, match=r"cannot be read .* chat template 2 of the tokenizer 1; run: .*FOLDER"
    ):
        Dataset.open(tmp_path).shards[0].tokens.chat_counts(chat_key("1", "2"))
    assert count_chats(tmp_path, _Slow()).num_counted == 1


def test_any_number_of_processes_writes_the_same(tmp_path: Path) -> None:
    tokenizer = write_chat_folder(tmp_path / "qwen", "qwen2-vl")
    written = []
    for workers in (1, 2):
        folder = tmp_path / f"{workers}"
        for number, count in enumerate((BATCH_ROWS + 9, 2)):
            write_tar(folder / f"{number}.tar", said(*(f"text {n} <|im_end|>" for n in range(count))))
        build_index(folder, workers=1, rules=IndexRules(conversations=Conversations.CHAT))
        chat = open_chat(load_tokenizer("qwen", tokenizer))
        report = count_chats(folder, chat, workers=workers)
        assert (report.num_counted, report.num_texts) == (2, BATCH_ROWS + 11)
        assert count_chats(folder, chat, workers=workers).num_counted == 0
        chat.close()
        written.append(
            {
                path.name: path.read_bytes()
                for path in folder.iterdir()
                if ".tokens-" in path.name or ".ids-" in path.name
            }
        )
    assert len(written[0]) == 4
    assert written[0] == written[1]
