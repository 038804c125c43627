"""Ids of conversations with images are those of transformers' processors, with the tokens that these write around."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.chats import EXPANDED, as_asked, draw_conversation, image_count, write_chat_folder
from PIL import Image
from transformers import (
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    InternVLProcessor,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLProcessor,
    SmolVLMImageProcessorPil,
    SmolVLMProcessor,
)
from transformers.models.smolvlm import processing_smolvlm

from dataserver.assembly import chat_digest, image_marks, load_tokenizer, open_chat
from dataserver.assembly.chat.template import read_template
from dataserver.assembly.image_runs import ImageRun, run_tokens
from dataserver.dataset import EncodedChat
from dataserver.dataset.shards.chat import read_conversation
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.item_sizes import item_grids, item_marks, item_tokens
from dataserver.planning.stream.samples import SampleSizes

SIDE = 28
SQUARE = {"height": SIDE, "width": SIDE}
GRIDS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 3)]
LEAST_PIXELS, MOST_PIXELS = SIDE**2, 9 * SIDE**2
TILES: dict[str, Any] = {"rule": "tiles", "side": SIDE}
EDGE = {"choice": "edge", "longest_edge": 3 * SIDE + SIDE}
SIZINGS: dict[str, dict[str, Any]] = {
    "Gemma3Processor": {"rule": "square", "side": SIDE, "merge": 2},
    "InternVLProcessor": {**TILES, "tiles": {"choice": "aspect", "min_tiles": 1, "max_tiles": 6}, "merge": 2},
    "Idefics3Processor": {**TILES, "tiles": EDGE, "merge": 2},
    "SmolVLMProcessor": {**TILES, "tiles": EDGE, "merge": 2},
    "LlavaOnevisionProcessor": {**TILES, "tiles": {"choice": "pinpoints", "grids": GRIDS, "max_tiles": 2}, "merge": 1},
    "Qwen3VLProcessor": {"rule": "qwen", "min_pixels": LEAST_PIXELS, "max_pixels": MOST_PIXELS, "merge": 2},
}


class WithoutVideos:
    """Processors whose part for videos, which needs torchvision, is not there."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        return None if name == "video_processor" else super().check_argument_for_proper_class(name, argument)  # type: ignore[misc]


class InternVL(WithoutVideos, InternVLProcessor):
    """Of images alone."""


class LlavaOnevision(WithoutVideos, LlavaOnevisionProcessor):
    """Of images alone."""


class Qwen3VL(WithoutVideos, Qwen3VLProcessor):
    """Of images alone."""


class SmolVLM(WithoutVideos, SmolVLMProcessor):
    """Of images alone."""


def processor_of(name: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    """The processor of transformers, for images of four or sixteen embeddings a part."""
    if name == "Gemma3Processor":
        return Gemma3Processor(Gemma3ImageProcessorPil(size=SQUARE), tokenizer, image_seq_length=4)
    sizes = {"size": {"longest_edge": 4 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
    if name == "Idefics3Processor":
        return Idefics3Processor(Idefics3ImageProcessorPil(**sizes), tokenizer, image_seq_len=4)
    if name == "SmolVLMProcessor":
        return SmolVLM(SmolVLMImageProcessorPil(**sizes), tokenizer, None, image_seq_len=4)
    if name == "InternVLProcessor":
        images = GotOcr2ImageProcessorPil(size=SQUARE, max_patches=6)
        return InternVL(images, tokenizer, None, image_seq_length=4)
    if name == "Qwen3VLProcessor":
        bounds = {"shortest_edge": LEAST_PIXELS, "longest_edge": MOST_PIXELS}
        return Qwen3VL(Qwen2VLImageProcessorPil(size=bounds, patch_size=7), tokenizer, None)
    pinpoints = [[rows * SIDE, columns * SIDE] for rows, columns in GRIDS]
    return LlavaOnevision(
        LlavaOnevisionImageProcessorPil(size=SQUARE, image_grid_pinpoints=pinpoints),
        tokenizer,
        None,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
    )


def sequence_of(found: EncodedChat, sizes: list[tuple[int, int]], sizing: Sizing) -> Iterator[int]:
    """The ids that servers make of a conversation whose images have these widths and heights."""
    widths, heights = np.array(sizes, np.int32).reshape(-1, 2).T
    offsets = np.array([0, len(sizes)])
    rows, columns, media = item_grids(offsets, widths, heights, None, sizing)
    layout = media.get("image_layout")
    sized = SampleSizes(np.zeros(1, np.int64), offsets, rows, columns, **media)
    tiles = np.zeros((len(sizes), 2), np.int32) if layout is None else layout[:, :2]
    counts = np.column_stack([item_tokens(sized, sizing), item_marks(sized, sizing), tiles]).tolist()
    runs = iter(ImageRun(*each) for each in counts)
    for id_, is_image in zip(found.ids.tolist(), found.images.tolist(), strict=True):
        if not is_image:
            yield id_
            continue
        run, made = next(runs), 0
        for ids, count, _ in run_tokens(id_, run, sizing):
            yield from [ids] * count if isinstance(ids, int) else ids.tolist()
            made += count
        assert made == run.tokens


def compare(name: str, folder: Path, number: int) -> int:
    """How many images conversations had whose ids are those of the processor."""
    write_chat_folder(folder, name)
    special = {token: word for token, word in EXPANDED[name].tokens if token != "bos_token"}
    theirs = PreTrainedTokenizerFast.from_pretrained(str(folder), extra_special_tokens=special)
    processor, tokenizer = processor_of(name, theirs), load_tokenizer(name, folder)
    most = 4 if name in ("Idefics3Processor", "SmolVLMProcessor") else 0
    fields = {"patch": 7, "resampling": "bicubic", **SIZINGS[name]}
    sizing = Sizing.model_validate({**fields, "marks": image_marks(tokenizer, most, most)})
    chat, rng, images = open_chat(tokenizer), random.Random(name), 0
    for _ in range(number):
        drawn = draw_conversation(EXPANDED[name], rng)
        messages, tools = drawn["messages"], drawn["tools"]
        sizes = [(rng.randint(8, 130), rng.randint(8, 130)) for _ in range(image_count(messages))]
        found = chat.encode_chat(read_conversation({"tools": tools}, messages, len(sizes)).to_json())
        asked = as_asked(EXPANDED[name], messages)
        text = theirs.apply_chat_template(asked, tools=tools or None, tokenize=False)
        pictures = [Image.new("RGB", size) for size in sizes]
        given = {"images": [pictures]} if pictures else {}
        expected = processor(text=[text], add_special_tokens=False, **given)["input_ids"][0]
        assert list(sequence_of(found, sizes, sizing)) == list(expected), messages
        assert not (found.targets & found.images).any()
        images += len(sizes)
    chat.close()
    return images


@pytest.fixture(autouse=True)
def _without_num2words(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolVLM's processor asks for that package, and uses it for the words of videos alone."""
    if processing_smolvlm.num2words is None:
        monkeypatch.setattr(processing_smolvlm, "num2words", str)


@pytest.mark.parametrize("name", EXPANDED)
def test_ids_are_those_of_processors(name: str, tmp_path: Path) -> None:
    assert compare(name, tmp_path, 50) > 50


@pytest.mark.long
@pytest.mark.parametrize("name", EXPANDED)
def test_ids_are_those_of_processors_in_many_conversations(name: str, tmp_path: Path) -> None:
    assert compare(name, tmp_path, 2_000) > 2_000


def test_idefics3_without_tiles_has_tokens_before_and_behind_each_image(tmp_path: Path) -> None:
    write_chat_folder(tmp_path, "Idefics3Processor")
    tokenizer = load_tokenizer("idefics3", tmp_path)
    marks = image_marks(tokenizer, 0, 0)
    assert marks is not None
    assert list(marks) == ["alone"]
    model = tokenizer.with_added_tokens()  # type: ignore[attr-defined]
    assert [model.id_to_token(id_) for id_ in marks["alone"]] == ["<fake_token_around_image>", "<global-img>"]


def test_what_a_processor_writes_is_a_part_of_the_digest(tmp_path: Path) -> None:
    """And only that: folders without such a processor keep the digests that they had."""
    write_chat_folder(tmp_path, "InternVLProcessor")
    tokenizer = load_tokenizer("internvl", tmp_path)
    with_processor = chat_digest(tokenizer)
    (tmp_path / "processor_config.json").unlink()
    found = read_template(tmp_path)
    assert found is not None
    assert found.expansion is None
    assert chat_digest(tokenizer) != with_processor
    assert image_marks(tokenizer, 4, 4) is None
