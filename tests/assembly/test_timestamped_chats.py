"""Conversations with videos whose frames have their times before them: the ids of Qwen3-VL's processor."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from assembly.test_media_chats import encoded, media_of
from builders.chats import EXPANDED, add_media, draw_conversation, write_chat_folder
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3VLProcessor
from transformers.processing_utils import ProcessorMixin

from dataserver.assembly import TokenizerError, load_tokenizer, open_chat, video_timestamps
from dataserver.assembly.image_runs import image_runs, run_tokens
from dataserver.dataset import EncodedChat
from dataserver.planning.job.fields import FrameRule, Sizing
from dataserver.planning.stream.item_sizes import VideoLengths, item_grids
from dataserver.planning.stream.samples import IMAGE, VIDEO, SampleSizes
from dataserver.planning.stream.video_frames import frame_number, sampled_frames

NAME = "Qwen3VLProcessor"
FAMILY = EXPANDED[NAME]._replace(has_tools=False)
RATE = 12.5


def processor_of(tokenizer: PreTrainedTokenizerFast) -> Any:
    """As much of the processor of transformers as makes text; what it has beside that needs torchvision."""
    found = SimpleNamespace(
        image_processor=SimpleNamespace(merge_size=2),
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        all_special_multimodal_tokens=["<|image_pad|>", "<|video_pad|>"],
    )
    found._calculate_timestamps = lambda *given: Qwen3VLProcessor._calculate_timestamps(found, *given)
    found.tokenizer = tokenizer
    return found


def theirs(processor: Any, text: str, grids: list[tuple[int, int, int, list[int]]], kinds: list[str]) -> list[int]:
    """The ids of a conversation whose images and videos have these grids; of videos the numbers of their frames."""
    words: dict[str, list[str]] = {"image": [], "video": []}
    for kind, (*grid, numbers) in zip(kinds, grids, strict=True):
        found = {f"{kind}_grid_thw": torch.tensor([grid])}
        if kind == "image":
            words[kind].append(Qwen3VLProcessor.replace_image_token(processor, found, 0))
            continue
        found["video_metadata"] = [SimpleNamespace(fps=RATE, frames_indices=[*numbers])]
        words[kind].append(Qwen3VLProcessor.replace_video_token(processor, found, 0))
    (whole,), _ = ProcessorMixin.get_text_with_replacements(processor, [text], words["image"], words["video"])
    return list(processor.tokenizer(whole)["input_ids"])


def ours(found: EncodedChat, sized: SampleSizes, sizing: Sizing, lengths: VideoLengths) -> list[int]:
    """The ids that servers make of it."""
    (runs,) = image_runs(sizing, sized, np.zeros(1, np.int64), lengths)  # type: ignore[arg-type]
    left, ids = iter(runs), list[int]()
    for id_, is_item in zip(found.ids.tolist(), found.images.tolist(), strict=True):
        if not is_item:
            ids.append(id_)
            continue
        run, before = next(left), len(ids)
        for piece, count, _ in run_tokens(id_, run, sizing):
            ids += [piece] * count if isinstance(piece, int) else piece.tolist()
        assert len(ids) - before == run.tokens
    return ids


def test_ids_are_those_of_the_processor(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("q", write_chat_folder(tmp_path, NAME))
    processor, rng = processor_of(PreTrainedTokenizerFast.from_pretrained(str(tmp_path))), random.Random(3)
    rule = {"rule": "qwen3", "min_pixels": 784, "max_pixels": 6 * 56 * 56, "timestamps": video_timestamps(tokenizer)}
    sizing = Sizing.model_validate({"patch": 14, "max_patches": 64, "video": rule})
    assert sizing.video is not None
    chat, groups = open_chat(tokenizer), 0
    for number in range(25):
        messages = draw_conversation(FAMILY, rng, 0)["messages"]
        add_media(messages, rng, rng.sample(["image", "video", "video", "image"], number % 5))
        kinds = media_of(messages)
        is_video = np.array([kind == "video" for kind in kinds], np.bool_)
        frames = np.array([rng.choice([1, rng.randint(2, 2_000)]) for _ in kinds], np.int32) * is_video
        lengths = VideoLengths(frames.astype(np.int32), np.round(frames / RATE * 1e6).astype(np.int64))
        sides = [np.array([rng.randint(20, 200) for _ in kinds], np.int32) for _ in range(2)]
        modality, offsets = np.where(is_video, VIDEO, IMAGE).astype(np.uint8), np.array([0, len(kinds)])
        rows, columns, media = item_grids(offsets, *sides, modality, sizing, lengths=lengths)
        sized = SampleSizes(np.zeros(1, np.int64), offsets, rows, columns, **media)
        grids = []
        for n, kind in enumerate(kinds):
            depth, numbers = int(media["image_depths"][n]), list[int]()
            if kind == "video":
                wanted = sampled_frames(int(frames[n]), int(lengths.microseconds[n]), sizing.video)
                numbers = [frame_number(i, wanted, int(frames[n]), FrameRule.QWEN3) for i in range(wanted)]
                groups += depth
            grids.append((depth, int(rows[n]) // depth, int(columns[n]), numbers))
        found = encoded(chat, messages)
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
        assert ours(found, sized, sizing, lengths) == theirs(processor, text, grids, kinds), messages
        assert not (found.targets & found.images).any()
    assert groups > 500
    chat.close()


def test_a_tokenizer_with_tokens_for_several_digits_is_refused(tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path, NAME)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"]["12"] = 10_000
    data["model"]["merges"].append(["1", "2"])
    (folder / "tokenizer.json").write_text(json.dumps(data))
    assert len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode("12").ids) == 1
    with pytest.raises(TokenizerError, match="does not make an id of each digit; serve videos in documents"):
        video_timestamps(load_tokenizer("q", folder))


def test_other_folders_have_no_timestamps(tmp_path: Path) -> None:
    assert video_timestamps(load_tokenizer("bytes")) is None
    assert video_timestamps(load_tokenizer("q", write_chat_folder(tmp_path, "Qwen2VLProcessor"))) is None
