"""Chats that name images and videos, over a real server: the tokens of their template, each item where it stands."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.chats import write_chat_folder
from serving.every_view import EveryView
from serving.harness import running
from shards import make_image, write_tar
from video.clips import video
from video.jobs import video_job

from dataserver.assembly import load_tokenizer, open_chat, video_timestamps
from dataserver.dataset import Conversations, Dataset, IndexRules, MediaMembers, build_index, count_chats
from dataserver.jobs import Catalog, FillingError, JobPlanner, fill_job
from dataserver.planning.job.identity import parse_job

pytest.importorskip("av", reason="the extra video is not installed")
TURNS = [
    "<video>\nwhat is it?",
    "<image> and <video> or <image>?",
    "What is this?",
    "a mark <video> is seen",
]
MEMBERS = [["v"], ["i", "v", "i"], ["i", "v"], ["v"]]

FIELDS = {
    "datasets": [{"name": "seen", "conversations": {"cut_at": "turn"}}],
    "tokenizer": {"name": "qwen"},
    "global_batch": 3,
    "microbatch": 1,
    "packing": {"enabled": False},
    "end": {"epochs": 2},
}
"""Fields of a job on chats, each sample a sequence of its own."""


def write(folder: Path, tokenizer: Path) -> None:
    """A conversation for each of `TURNS`; the third has no marks, the last one of the wrong number in an answer."""
    members, image = [], make_image(np.random.default_rng(0), 56, 56)
    for number, (turn, kinds) in enumerate(zip(TURNS, MEMBERS, strict=True)):
        for n, kind in enumerate(kinds):
            is_video = kind == "v"
            name = f"{number}.{n}.{'mp4' if is_video else 'jpg'}"
            members.append((name, video("h264", 4 + 8 * n, seed=number) if is_video else image))
        messages = [{"role": "user", "content": turn}, {"role": "assistant", "content": f"answer {number}"}]
        if number == 3:
            messages[1]["content"] = "two <video> <video>"
        members.append((f"{number}.json", json.dumps({"messages": messages}).encode()))
    write_tar(folder / "0.tar", members)
    build_index(folder, workers=1, rules=IndexRules(conversations=Conversations.CHAT, video=MediaMembers.SERVE))
    chat = open_chat(load_tokenizer("qwen", tokenizer))
    assert count_chats(folder, chat).num_failed == 0
    chat.close()


def plan_here(folder: Path, tokenizer: Path, data: dict[str, Any]) -> None:
    """Plan a job in this process, however long that takes: what is compiled for it, no server waits for."""
    catalog = Catalog({"seen": Dataset.open(folder)}, {"qwen": load_tokenizer("qwen", tokenizer)})
    job = parse_job(fill_job(data, catalog))
    JobPlanner(job, catalog.find_datasets(job.stream)).plan(0)


def test_chats_with_images_and_videos_are_served(tmp_path: Path) -> None:
    tokenizer = write_chat_folder(tmp_path / "qwen", "Qwen2VLProcessor")
    write(tmp_path / "d", tokenizer)
    (shard,) = Dataset.open(tmp_path / "d").shards
    assert shard.keys() == ["0", "1", "2"]
    assert dict(shard.findings().counts) == {"bad_conversation": 1}
    kinds = [[shard.image(row, n).modality for n in range(count)] for row, count in enumerate((1, 3, 2))]
    assert kinds == [[2], [0, 2, 0], [0, 2]], "without marks images go before videos"
    data = video_job(vit=1, eyes=1, llm=1, **FIELDS)
    plan_here(tmp_path / "d", tokenizer, data)
    with running({"seen": tmp_path / "d"}, tokenizers={"qwen": tokenizer}) as server:
        views = EveryView(server, "seen", data, {"vit": 1, "eyes": 1, "llm": 1})
    model = load_tokenizer("qwen", tokenizer).with_added_tokens()  # type: ignore[attr-defined]
    pads = {0: model.token_to_id("<|image_pad|>"), 2: model.token_to_id("<|video_pad|>")}
    num_read, embeddings = 0, np.zeros(2, np.int64)
    for name, _, _, found in views.of:
        if name != "llm":
            continue
        ids, labels = found["token_ids"], found["labels"]
        slots = np.zeros(len(ids), np.bool_)
        slots[found["embedding_slots"]] = True
        assert (slots == np.isin(ids, list(pads.values()))).all()
        embeddings += [int((ids == pad).sum()) for pad in pads.values()]
        for a, b in zip(found["cu_lengths"][:-1], found["cu_lengths"][1:], strict=True):
            text = model.decode(ids[a:b].tolist(), skip_special_tokens=False)
            said = model.decode(ids[a:b][1:][labels[a:b][:-1] >= 0].tolist(), skip_special_tokens=False)
            number = int(said.removeprefix("answer ").removesuffix("<|im_end|>"))
            runs = [run[0] for run in np.split(ids[a:b], np.flatnonzero(np.diff(ids[a:b])) + 1)]
            order = [kind for run in runs for kind, pad in pads.items() if run == pad]
            assert order == kinds[number], text
            num_read += 1
    assert num_read == 6
    patches = [sum(int(found["cu_patches"][-1]) for n, *_, found in views.of if n == name) for name in ("vit", "eyes")]
    assert embeddings.tolist() == [count // 4 for count in patches]
    assert embeddings.all()


def test_times_of_frames_are_filled_in_and_served(tmp_path: Path) -> None:
    """As Qwen3-VL's processor writes them: the text of each group of frames around its embeddings."""
    tokenizer = write_chat_folder(tmp_path / "qwen", "Qwen3VLProcessor")
    write(tmp_path / "d", tokenizer)
    rule = {"rule": "qwen3", "min_pixels": 784, "max_pixels": 8 * 28 * 28}
    data = video_job(vit=1, eyes=1, llm=1, **FIELDS, sizing={"max_patches": 64, "video": rule})
    plan_here(tmp_path / "d", tokenizer, data)
    loaded = load_tokenizer("qwen", tokenizer)
    catalog = Catalog({"seen": Dataset.open(tmp_path / "d")}, {"qwen": loaded})
    filled = fill_job(data, catalog)
    assert filled["stream"]["sizing"]["video"] == {**rule, "timestamps": video_timestamps(loaded)}
    with pytest.raises(FillingError, match=r"writes the times of their frames.*set sizing\.video\.rule to qwen3"):
        fill_job(video_job(vit=1, eyes=1, llm=1, **FIELDS), catalog)
    with running({"seen": tmp_path / "d"}, tokenizers={"qwen": tokenizer}) as server:
        views = EveryView(server, "seen", data, {"vit": 1, "eyes": 1, "llm": 1})
    model = loaded.with_added_tokens()  # type: ignore[attr-defined]
    pad, groups, times = model.token_to_id("<|video_pad|>"), 0, list[str]()
    for name, _, _, found in views.of:
        groups += int(found["grid"][:, 0].sum()) if name == "eyes" else 0
        if name != "llm":
            continue
        text = model.decode(found["token_ids"].tolist(), skip_special_tokens=False)
        group = r"<[\d.]+ seconds><\|vision_start\|>(?:<\|video_pad\|>)+<\|vision_end\|>"
        whole = rf"<\|vision_start\|>(?:{group})+<\|vision_end\|>"
        assert text.count("<|video_pad|>") == sum(run.count("<|video_pad|>") for run in re.findall(whole, text))
        times += re.findall(r"<([\d.]+) seconds>", text)
        slots = np.zeros(len(found["token_ids"]), np.bool_)
        slots[found["embedding_slots"]] = True
        assert slots[found["token_ids"] == pad].all()
    assert len(times) == groups
    # videos of 4 or 12 frames, 10 a second; at least 4 are read: 0, 1, 2, 3, and 0, 4, 7, 11
    assert set(times) == {"0.1", "0.2", "0.9"}
