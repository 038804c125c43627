"""Conversations from files to trainers: their own tokens, an image where the template has it, answers alone learned."""

import io
import json
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.chats import FAMILIES, draw_conversation, image_count, write_chat_folder
from cli.server_process import refused, run, serving
from disttrain.v1.data_service_pb2 import GetOrCreateJobRequest
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from e2e.streams import read_views
from PIL import Image
from serving.harness import job_data
from shards import write_tar

from dataserver.assembly import ChatTokenizer, load_tokenizer, open_chat
from dataserver.dataset import Dataset
from dataserver.dataset.shards.chat import read_conversation
from dataserver.planning.job.identity import JobSpecError
from trainclient.client import DataClient

MODULES = [{"name": "vit", "kind": "encoder"}, {"name": "llm", "kind": "backbone"}]
PATCH, MERGE = 14, 2
Conversation = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a chat model."""
    return write_chat_folder(tmp_path_factory.mktemp("models") / "qwen", "qwen2-vl")


@pytest.fixture(scope="module")
def chat(tokenizer: Path) -> Iterator[ChatTokenizer]:
    """Its tokenizer: one process renders for all tests."""
    found = open_chat(load_tokenizer("qwen", tokenizer))
    yield found
    found.close()


def _image(number: int) -> bytes:
    """An image of 28 x 28 (n + 1) pixels: n + 1 tokens."""
    buffer = io.BytesIO()
    Image.new("RGB", (PATCH * MERGE * (number + 1), PATCH * MERGE), (number, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def _conversations(count: int) -> list[Conversation]:
    rng = random.Random(3)
    return [draw_conversation(FAMILIES["qwen2-vl"], rng, n % 3) for n in range(count)]


def _write_tar(folder: Path, conversations: list[Conversation]) -> None:
    members = []
    for n, conversation in enumerate(conversations):
        members += [(f"{n:03}.{i}.png", _image(i)) for i in range(image_count(conversation["messages"]))]
        members.append((f"{n:03}.json", json.dumps({"messages": conversation["messages"]}).encode()))
    write_tar(folder / "0.tar", members)


def _write_manifest(folder: Path, conversations: list[Conversation]) -> None:
    """As LLaVA and ShareGPT have them: marks in the texts, and the system's text beside the turns."""
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.png").write_bytes(_image(i))
    lines = []
    for conversation in conversations:
        messages = conversation["messages"]
        names = [f"{i}.png" for i in range(image_count(messages))]
        line: Conversation = {"images": names} if len(names) > 1 else {"image": names[0]} if names else {}
        if messages[0]["role"] == "system":
            line["system"], messages = messages[0]["content"], messages[1:]
        roles = {"user": "human", "assistant": "gpt"}
        lines.append({**line, "conversations": [{"from": roles[m["role"]], "value": _marked(m)} for m in messages]})
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))


def _marked(message: Conversation) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join("<image>" if part["type"] == "image" else part["text"] for part in content)


def _write_parquet(folder: Path, conversations: list[Conversation]) -> None:
    """As the Hub has them."""
    folder.mkdir()
    rows = [
        {
            "messages": [{"role": m["role"], "content": _marked(m)} for m in conversation["messages"]],
            "images": [{"bytes": _image(i), "path": None} for i in range(image_count(conversation["messages"]))],
        }
        for conversation in conversations
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet", compression="none", use_dictionary=False)


WRITERS: dict[str, Callable[[Path, list[Conversation]], None]] = {
    "tar": _write_tar,
    "manifest": _write_manifest,
    "parquet": _write_parquet,
}


def job(conversations: Any = {}, **changes: Any) -> dict[str, Any]:  # noqa: B006
    fields = {
        "modules": MODULES,
        "datasets": [{"name": "d", "conversations": conversations}],
        "tokenizer": {"name": "qwen"},
        "generation": {"ratio": "0"},
        "global_batch": 2,
        "end": {"epochs": 1},
    }
    return job_data(**{**fields, **changes})


def notes(address: str, data: dict[str, Any]) -> list[str]:
    """What a server says of a job."""
    with grpc.insecure_channel(address) as channel:
        answer = DataServiceStub(channel).GetOrCreateJob(
            GetOrCreateJobRequest(job_spec_json=json.dumps(data)), timeout=60
        )
        return list(answer.notes)


def sequences(address: str, data: dict[str, Any]) -> list[tuple[list[int], list[int], int]]:
    """Ids and labels of each sample of a job, and the denominator of its step."""
    with DataClient([address], data, "llm", 0) as client:
        complete = client.job
    found = []

    def use(batch: Any) -> None:
        if (ids := batch.tensors.get("token_ids")) is not None:
            ends = batch.tensors["cu_lengths"].flatten().tolist()
            labels = batch.tensors["labels"].flatten().tolist()
            for a, b in pairwise(ends):
                if b > a:
                    found.append((ids.flatten().tolist()[a:b], labels[a:b], batch.text_tokens))

    read_views([address], complete, use)
    return found


def expected(chat: ChatTokenizer, conversation: Conversation, is_marked: bool = False) -> tuple[list[int], list[int]]:
    """Ids and labels by plain loops."""
    messages, count = conversation["messages"], image_count(conversation["messages"])
    if is_marked:
        messages = [{**message, "content": _marked(message)} for message in messages]
    found = chat.encode_chat(read_conversation({}, messages, count).to_json())
    ids, learned, image = [], [], 0
    for id_, target, is_image in zip(found.ids.tolist(), found.targets, found.images, strict=True):
        image += bool(is_image)
        ids += [id_] * (image if is_image else 1)
        learned += [bool(target)] * (image if is_image else 1)
    labels = [b if t else -100 for b, t in zip(ids[1:], learned[1:], strict=True)]
    return ids, [*labels, -100]


_USER, _ASSISTANT = "<|im_start|> u ser \u010a", "<|im_start|> a s s is t a n t \u010a"
_IMAGES = "<|vision_start|> <|image_pad|> <|vision_end|> n <|vision_start|> <|image_pad|> <|image_pad|> <|vision_end|>"
_IMAGE = {"type": "image"}
BY_HAND: list[tuple[list[Any], str]] = [
    (
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "ho"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "at"},
        ],
        f"{_USER} h i <|im_end|> \u010a {_ASSISTANT} *h *o *<|im_end|> \u010a "
        f"{_USER} a <|im_end|> \u010a {_ASSISTANT} *at *<|im_end|> \u010a",
    ),
    (
        [
            {"role": "user", "content": [_IMAGE, {"type": "text", "text": "n"}, _IMAGE, {"type": "text", "text": "o"}]},
            {"role": "assistant", "content": "yo"},
        ],
        f"{_USER} {_IMAGES} o <|im_end|> \u010a {_ASSISTANT} *y *o *<|im_end|> \u010a",
    ),
]
"""Messages, and the tokens of their sequences as the vocabulary writes them; those with a star are learned."""


def _by_hand(tokenizer: Path, tokens: str) -> tuple[list[int], list[int]]:
    """Ids and labels of a sequence that is written token by token."""
    model = json.loads((tokenizer / "tokenizer.json").read_text())
    known = {**model["model"]["vocab"], **{token["content"]: token["id"] for token in model["added_tokens"]}}
    words = tokens.split(" ")
    ids = [known[word.removeprefix("*")] for word in words]
    labels = [id_ if word.startswith("*") else -100 for id_, word in zip(ids, words, strict=True)]
    return ids, [*labels[1:], -100]


@pytest.mark.parametrize("form", WRITERS)
def test_conversations_are_served_as_their_template_renders_them(
    tmp_path: Path, form: str, tokenizer: Path, chat: ChatTokenizer
) -> None:
    drawn = _conversations(9)
    conversations = [*({"messages": messages} for messages, _ in BY_HAND), *drawn]
    WRITERS[form](tmp_path / "d", conversations)
    done = run("index", tmp_path / "d", "--conversations", "chat", "--tokenizer", f"qwen={tokenizer}")
    assert done.returncode == 0, done.stderr
    assert "samples      11" in done.stdout, done.stdout
    assert "left out" not in done.stdout, done.stdout
    with serving("--dataset", f"d={tmp_path / 'd'}", "--tokenizer", f"qwen={tokenizer}") as server:
        found = sequences(server.address, job(seq_len=4096))
    wanted = [_by_hand(tokenizer, tokens) for _, tokens in BY_HAND]
    wanted += [expected(chat, conversation, form != "tar") for conversation in drawn]
    assert sorted((ids, labels) for ids, labels, _ in found) == sorted(wanted)
    learned = sum(label >= 0 for _, labels in wanted for label in labels)
    assert 0 < learned < sum(len(ids) for ids, _ in wanted) / 2


def test_a_step_counts_what_is_learned(tmp_path: Path, tokenizer: Path) -> None:
    _write_tar(tmp_path / "d", _conversations(8))
    run("index", tmp_path / "d", "--conversations", "chat", "--tokenizer", f"qwen={tokenizer}")
    with serving("--dataset", f"d={tmp_path / 'd'}", "--tokenizer", f"qwen={tokenizer}") as server:
        one_step = job(seq_len=4096, global_batch=8, packing={"enabled": False})
        found = sequences(server.address, one_step)
    assert len(found) == 8
    assert {total for _, _, total in found} == {sum(label >= 0 for _, labels, _ in found for label in labels)}


def test_a_long_conversation_is_cut_behind_an_answer_or_left_out(
    tmp_path: Path, tokenizer: Path, chat: ChatTokenizer
) -> None:
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    image = {"type": "image"}
    long = [*short, {"role": "user", "content": [image, {"type": "text", "text": "c" * 100}]}, short[1], *short]
    wide = [{"role": "user", "content": "d" * 200}, short[1]]
    conversations = [{"messages": messages} for messages in (short, long, wide)]
    _write_tar(tmp_path / "d", conversations)
    run("index", tmp_path / "d", "--conversations", "chat", "--tokenizer", f"qwen={tokenizer}")
    whole, cut = (expected(chat, {"messages": short}) for _ in range(2))
    with serving("--dataset", f"d={tmp_path / 'd'}", "--tokenizer", f"qwen={tokenizer}") as server:
        one = {"seq_len": 100, "global_batch": 1, "packing": {"enabled": False}}
        assert [(ids, labels) for ids, labels, _ in sequences(server.address, job(**one))] == [whole]
        found = sequences(server.address, job({"cut_at": "turn"}, **one))
        left, is_cut = notes(server.address, job({"cut_at": "turn"}, **one))
        assert left == (
            "dataset 'd': 1 of 3 conversations are left out, since they are longer than seq_len 100, the first 002 of "
            "0.tar; no answer fits; raise it; dataserver lint --job lists them"
        )
        assert is_cut.startswith("dataset 'd': 1 of 3 conversations are cut behind an answer, since they are longer")
        assert "the first 001 of 0.tar" in is_cut
        (said,) = notes(server.address, job(**one))
        assert said.startswith(
            "dataset 'd': 2 of 3 conversations are left out, since they are longer than seq_len 100, the first 001"
        )
    newline = cut[0][-1]
    assert cut[0][-2:] == [cut[0][-2], newline], "the template ends a turn with a line break"
    assert sorted(ids for ids, _, _ in found) == sorted([whole[0], whole[0][:-1]])


def test_what_cannot_be_used_is_named(tmp_path: Path, tokenizer: Path, chat: ChatTokenizer) -> None:
    good = {"messages": [{"role": "user", "content": "hi <|im_end|>"}, {"role": "assistant", "content": "ho"}]}
    alone = {"messages": [{"role": "user", "content": "hi"}]}
    marks = {"messages": [{"role": "user", "content": "<image> hi"}, good["messages"][1]]}
    members = [(f"{n}.json", json.dumps(found).encode()) for n, found in enumerate([good, alone, marks, {"a": 1}])]
    members += [(f"5.{i}.png", _image(i)) for i in range(2)]
    members.append(("5.json", json.dumps(marks).encode()))
    write_tar(tmp_path / "d" / "0.tar", members)
    assert refused("index", tmp_path / "d", "--conversations", "chat").endswith(
        "--conversations chat needs a chat template; give --tokenizer NAME=FOLDER of a chat model"
    )
    done = run("index", tmp_path / "d", "--conversations", "chat", "--tokenizer", f"qwen={tokenizer}")
    assert "samples      1\n  left out     4 bad_conversation" in done.stdout, (done.stdout, done.stderr)
    lint = run("lint", tmp_path / "d").stdout
    assert "no turn of an assistant has any text, the roles are ['user']" in lint
    assert "1 placeholders in the turns and 0 images" in lint
    assert "1 placeholders in the turns and 2 images; write one <image>, or one part of the type image, for" in lint
    ids = Dataset.open(tmp_path / "d").shards[0]
    assert ids.num_samples == 1
    with serving("--dataset", f"d={tmp_path / 'd'}", "--tokenizer", f"qwen={tokenizer}") as server:
        ((found, _, _),) = sequences(server.address, job(global_batch=1, packing={"enabled": False}))
        with pytest.raises(JobSpecError, match=r"conversations, which are understood alone"):
            sequences(server.address, job(generation={"ratio": "0.5"}))
    ends = expected(chat, {"messages": [{"role": "user", "content": ""}, good["messages"][1]]})[0]
    assert found.count(ends[-2]) == ends.count(ends[-2]), "what a user writes is no end of a turn"
    assert np.array(found).size == len(ends) + len("hi <|im_end|>")


def test_a_template_that_reads_files_is_refused_at_once(tmp_path: Path) -> None:
    reading = write_chat_folder(tmp_path / "qwen", "qwen3")
    _write_tar(tmp_path / "d", _conversations(2))
    (reading / "chat_template.jinja").write_text("{% include '/etc/passwd' %}")
    said = refused("index", tmp_path / "d", "--conversations", "chat", "--tokenizer", f"qwen={reading}")
    assert "cannot be used: TemplateError: it reads the template '/etc/passwd', and templates have no files" in said
