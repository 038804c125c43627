"""Ids of conversations with clips and videos are those of transformers' templates and processors."""

import json
import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders.chats import MEDIA, add_media, draw_conversation, write_chat_folder
from transformers import PreTrainedTokenizerFast, Qwen2AudioProcessor, Qwen2VLProcessor, WhisperFeatureExtractor

from dataserver.assembly import ChatTokenizer, TokenizerError, chat_digest, load_tokenizer, open_chat
from dataserver.dataset import EncodedChat, TokenizingError
from dataserver.dataset.shards.chat import read_conversation
from dataserver.planning.job.fields import AudioSizing, Sizing
from dataserver.planning.stream.item_sizes import item_grids, item_tokens
from dataserver.planning.stream.samples import AUDIO, SampleSizes


def opened(folder: Path, name: str) -> ChatTokenizer:
    return open_chat(load_tokenizer(name, write_chat_folder(folder, name)))


def media_of(messages: list[dict[str, Any]]) -> list[str]:
    """Kinds of the parts that are no texts, in order."""
    parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
    return [part["type"] for part in parts if part["type"] != "text"]


def encoded(chat: ChatTokenizer, messages: list[dict[str, Any]]) -> EncodedChat:
    kinds = media_of(messages)
    others = {kind: kinds.count(kind) for kind in ("audio", "video")}
    return chat.encode_chat(read_conversation({}, messages, kinds.count("image"), others).to_json())


def repeated(found: EncodedChat, counts: Sequence[int]) -> list[int]:
    """Ids with those that stand for an image, a clip or a video repeated."""
    of_each = np.ones(len(found.ids), np.int64)
    of_each[found.images] = counts
    return np.repeat(found.ids, of_each).tolist()


def theirs_of(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def test_clips_take_the_tokens_of_the_processor(tmp_path: Path) -> None:
    """Its own template, which numbers clips."""
    write_chat_folder(tmp_path, "Qwen2AudioProcessor")
    theirs = theirs_of(tmp_path)
    processor = Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=8, chunk_length=1), theirs)
    (tmp_path / "chat_template.jinja").write_text(processor.chat_template)
    chat, rng, num_clips = open_chat(load_tokenizer("a", tmp_path)), random.Random(1), 0
    for number in range(12):
        messages = draw_conversation(MEDIA["Qwen2AudioProcessor"], rng)["messages"]
        add_media(messages, rng, ["audio"] * (number % 3))
        lengths = [rng.randint(400, 20_000) for _ in range(number % 3)]
        found = encoded(chat, messages)
        text = processor.apply_chat_template(messages, tokenize=False)
        clips = [np.zeros(length, np.float32) for length in lengths]
        given = {"audio": clips, "sampling_rate": 16_000} if clips else {}
        expected = processor(text=[text], **given)["input_ids"][0]
        sizes = np.array(lengths, np.int32)
        sizing = Sizing(audio=AudioSizing(max_seconds=1))
        offsets, rates = np.array([0, len(lengths)]), np.full(len(lengths), 16_000, np.int32)
        rows, columns, media = item_grids(offsets, sizes, rates, np.full(len(lengths), AUDIO, np.uint8), sizing)
        sized = SampleSizes(np.zeros(1, np.int64), offsets, rows, columns, **media)
        assert repeated(found, item_tokens(sized, sizing).tolist()) == list(expected), messages
        assert not (found.targets & found.images).any()
        num_clips += len(lengths)
    assert num_clips == 12
    chat.close()


def test_videos_and_images_take_their_own_tokens(tmp_path: Path) -> None:
    chat = opened(tmp_path, "Qwen2VLProcessor")
    theirs, rng = theirs_of(tmp_path), random.Random(2)
    processor = SimpleNamespace(
        **{kind: SimpleNamespace(merge_size=2) for kind in ("image_processor", "video_processor")},
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
    )
    replace = {"image": Qwen2VLProcessor.replace_image_token, "video": Qwen2VLProcessor.replace_video_token}
    for number in range(12):
        messages = draw_conversation(MEDIA["Qwen2VLProcessor"], rng, 0)["messages"]
        add_media(messages, rng, rng.sample(["image", "video", "video", "image"], number % 4))
        found = encoded(chat, messages)
        pieces, counts = theirs.apply_chat_template(messages, tokenize=False).split("<|vision_start|>"), []
        for n, kind in enumerate(media_of(messages), 1):
            depth = rng.randint(1, 4) if kind == "video" else 1
            grid = torch.tensor([[depth, 2 * rng.randint(1, 3), 2 * rng.randint(1, 3)]])
            words = replace[kind](processor, {f"{kind}_grid_thw": grid}, 0)
            pieces[n] = words + pieces[n].removeprefix(f"<|{kind}_pad|>")
            counts.append(words.count("<|"))
        assert repeated(found, counts) == theirs("<|vision_start|>".join(pieces))["input_ids"], messages
        assert int(found.images.sum()) == len(counts) == number % 4
    chat.close()


def test_what_nobody_knows_is_refused(tmp_path: Path) -> None:
    video = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "what?"}]}
    said = [video, {"role": "assistant", "content": "a cat"}]
    chat = opened(tmp_path, "Qwen2VLProcessor")
    assert encoded(chat, said).images.sum() == 1
    clip = [{"role": "user", "content": [{"type": "audio"}]}, said[1]]
    with pytest.raises(
        TokenizingError, match=r"which tokens Qwen2VLProcessor writes for these is not known; use a mode"
    ):
        encoded(chat, clip)
    chat.close()
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "Glm4vProcessor"}))
    with pytest.raises(
        TokenizingError, match=r"has videos, and which tokens Glm4vProcessor .* one of Qwen2VLProcessor"
    ):
        encoded(open_chat(load_tokenizer("q", tmp_path)), said)
    images_first = MEDIA["Qwen2VLProcessor"].template.replace(
        "message.content %}{% if", "message.content | sort(attribute='type') %}{% if"
    )
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text(images_first)
    both = [{"role": "user", "content": [*video["content"], {"type": "image"}]}, said[1]]
    with pytest.raises(TokenizingError, match="writes image where the conversation has video"):
        encoded(open_chat(load_tokenizer("q", tmp_path)), both)


def test_what_a_processor_refuses_is_a_part_of_the_digest(tmp_path: Path) -> None:
    """Where a dataset serves it: two servers whose folders differ in that would leave out different samples."""
    write_chat_folder(tmp_path, "qwen2-vl")
    tokenizer, digests = load_tokenizer("q", tmp_path), dict[str, list[str]]()
    for name in ("", "Qwen2AudioProcessor", "Qwen2VLProcessorFast", "Glm4vProcessor"):
        (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": name}))
        digests[name] = [chat_digest(tokenizer, media) for media in ((), ("audio",), ("video",), ("audio", "video"))]
    plain, audio, video, neither = digests.values()
    assert set(plain) == {plain[0]}
    assert plain[0] == audio[0] == video[0] == neither[0]
    assert audio[1] == video[2] == plain[0]
    assert audio[2:] == [neither[2]] * 2
    assert video[1::2] == [neither[1]] * 2
    assert len({plain[0], *neither[1:]}) == 4
    chat = open_chat(tokenizer, ["video"])
    assert chat.chat_digest == neither[2]
    assert pickle.loads(pickle.dumps(chat)).chat_digest == neither[2]
    begun = pickle.dumps(open_chat(tokenizer, ["audio", "video"]))
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2VLProcessor"}))
    with pytest.raises(TokenizerError, match="changed while they were used"):
        pickle.loads(begun)
    chat.close()
