"""Images of a job with a sizing rule: planned, counted and served as an image processor makes them."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assembly.test_prepared_views import Run, image_of, open_run, tensors_of
from images.pictures import join_patches
from PIL import Image
from shards import write_pairs
from transformers import CLIPImageProcessorPil, Qwen2VLImageProcessorPil

from dataserver.jobs.shard_statistics import Rules
from dataserver.planning.job.fields import ModuleKind, Sizing
from dataserver.planning.stream.samples import Task

BYTES: dict[str, Any] = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
QWEN = {"rule": "qwen", "patch": 7, "merge": 2, "min_pixels": 28 * 28, "max_pixels": 42 * 42, "resampling": "bicubic"}
CROP = {"rule": "crop", "patch": 7, "merge": 2, "side": 28, "resampling": "bicubic"}


def by_qwen(image: Image.Image) -> np.ndarray:
    size = {"shortest_edge": 28 * 28, "longest_edge": 42 * 42}
    made = Qwen2VLImageProcessorPil(size=size, patch_size=7)(image, **BYTES)
    patches = made["pixel_values"].reshape(-1, 3, 2, 49)[:, :, 0].transpose(0, 2, 1)
    rows, columns = made["image_grid_thw"][0, 1:].tolist()
    return join_patches(patches.reshape(len(patches), -1).astype(np.uint8), rows, columns, 7, 2)


def by_clip(image: Image.Image) -> np.ndarray:
    made = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})(image, **BYTES)
    pixels: np.ndarray = made["pixel_values"][0].transpose(1, 2, 0)
    return pixels


def served_images(run: Run) -> int:
    """Compare every image of a run with its processor's; how many there are."""
    processor, most = (by_qwen, 0) if run.job.stream.sizing.rule == "qwen" else (by_clip, 1)
    number = 0
    for plan, view in run.views(ModuleKind.ENCODER):
        tensors = tensors_of(run.prepare(plan, view))
        ends = tensors["cu_patches"].tolist()
        for at, item in enumerate(view.items.tolist()):
            data, _, sample = image_of(run, plan, item)
            rows, columns = tensors["grid"][at].tolist()
            found = join_patches(tensors["patches"][ends[at] : ends[at + 1]], rows, columns, 7, 2)
            with Image.open(io.BytesIO(data)) as image:
                expected = processor(image.convert("RGB"))
            assert found.shape == expected.shape
            assert np.abs(found.astype(int) - expected).max() <= most
            assert plan.samples.task[sample] == Task.UNDERSTANDING
            tokens = rows * columns // 4 + 4 + plan.samples.text_tokens[sample]
            assert plan.samples.tokens[sample] == tokens
            number += 1
    return number


@pytest.mark.parametrize("sizing", [QWEN, CROP], ids=["qwen", "crop"])
def test_every_image_is_its_processors(sizing: dict[str, int | str], tmp_path: Path) -> None:
    run = open_run([write_pairs(tmp_path / "pairs", formats=("PNG",))], ratio="0", sizing=sizing)
    assert served_images(run) > 8


def test_sizings_with_other_grids_have_statistics_of_their_own() -> None:
    squares = [
        {**CROP, "side": 32},
        {**CROP, "rule": "square", "side": 28},
        {"patch": 7, "merge": 2, "max_patches": 16},
    ]
    sizings = [Sizing.model_validate(fields) for fields in (QWEN, {**QWEN, "min_pixels": 1}, CROP, *squares)]
    keys = [Rules("digest", sizing).key() for sizing in sizings]
    assert all(keys.count(key) == 1 for key in keys)
    filtered = sizings[2].model_copy(update={"resampling": "lanczos", "quality": "exact"})
    assert Rules("digest", filtered).key() == keys[2]
    assert keys[-1] == ["digest", 7, 2, 16, "", ""], "as before there were rules"
