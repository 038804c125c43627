"""Images of a job that cuts them into tiles: planned, counted and served as processors of transformers make them."""

import hashlib
import io
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assembly.test_prepared_views import Run, image_of, open_run, tensors_of
from images.pictures import join_patches
from PIL import Image
from shards import write_interleaved, write_pairs
from transformers import GotOcr2ImageProcessorPil, Idefics3ImageProcessorPil, LlavaOnevisionImageProcessorPil

from dataserver.jobs.shard_statistics import Rules
from dataserver.planning.job.fields import ModuleKind, Sizing

BYTES: dict[str, Any] = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
SIDE = 30
PATCHES = {"rule": "tiles", "patch": 7, "side": SIDE, "resampling": "bicubic", "quality": "exact"}
GRIDS = [(rows, columns) for rows in (1, 2, 3) for columns in (1, 2, 3)]
MARKS = {
    "alone": [210, 211],
    "tiles": [[[210, 220 + row * 4 + column] for column in range(4)] for row in range(4)],
    "row_end": [212],
    "whole": [213, 210, 211],
}
SIZINGS: dict[str, dict[str, Any]] = {
    "onevision": {**PATCHES, "merge": 1, "tiles": {"choice": "pinpoints", "grids": GRIDS, "max_tiles": 2}},
    "internvl": {**PATCHES, "merge": 2, "tiles": {"choice": "aspect", "min_tiles": 1, "max_tiles": 6}},
    "idefics3": {
        **PATCHES,
        "merge": 2,
        "resampling": "lanczos",
        "tiles": {"choice": "edge", "longest_edge": 3 * SIDE},
        "marks": MARKS,
    },
}
SQUARE = {"height": SIDE, "width": SIDE}


def parts_by(family: str, images: list[Image.Image]) -> list[np.ndarray]:
    """The pictures of all parts of the images of a sample, uint8 [parts, 3, side, side] each."""
    if family == "internvl":
        processor = GotOcr2ImageProcessorPil(size=SQUARE, crop_to_patches=True, max_patches=6)
        return [processor([image], **BYTES)["pixel_values"] for image in images]
    if family == "idefics3":
        edges = {"size": {"longest_edge": 3 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
        return [Idefics3ImageProcessorPil(**edges)([[image]], **BYTES)["pixel_values"][0] for image in images]
    pinpoints = [[rows * SIDE, columns * SIDE] for rows, columns in GRIDS]
    processor = LlavaOnevisionImageProcessorPil(
        size=SQUARE, image_grid_pinpoints=pinpoints, image_mean=[0.5] * 3, do_pad=False
    )
    return [*processor([images], **{**BYTES, "return_tensors": None})["pixel_values"]]


def served_images(run: Run, family: str) -> list[int]:
    """Compare every image of a run with its processor's; the parts of each."""
    counts = []
    for plan, view in run.views(ModuleKind.ENCODER):
        tensors = tensors_of(run.prepare(plan, view))
        sizing, samples = run.job.spec.stream.sizing, plan.samples
        cells, merge = SIDE // 7, sizing.merge
        ends = tensors["cu_patches"]
        assert tensors["grid"].tolist() == [[cells, cells]] * (len(ends) - 1)
        assert (np.diff(ends) == cells**2).all()
        part = 0
        for item in view.items.tolist():
            sample = int(samples.image_sample[item])
            of_sample = range(*samples.image_offsets[sample : sample + 2].tolist())
            pictures = [Image.open(io.BytesIO(image_of(run, plan, i)[0])).convert("RGB") for i in of_sample]
            expected = parts_by(family, pictures)[item - of_sample[0]]
            for picture in expected:
                cut = join_patches(tensors["patches"][ends[part] : ends[part + 1]], cells, cells, 7, merge)
                whole = np.asarray(picture).transpose(1, 2, 0)[: cells * 7, : cells * 7]
                assert np.abs(cut.astype(int) - whole).max() <= 1
                part += 1
            counts.append(len(expected))
        assert part == len(ends) - 1
        assert tensors["tiles"].tolist() == samples.image_layout[view.items].tolist()  # type: ignore[index]
        routed = sum(int(routing.rows.sum()) for routing in view.routings)
        assert tensors["cu_rows"][-1] == routed
    return counts


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("tiles")
    return [
        write_pairs(root / "pairs", 12, formats=("PNG",), median_size=64),
        write_interleaved(root / "documents", 6, median_size=64),
    ]


@pytest.mark.parametrize("family", SIZINGS)
def test_every_part_is_its_processors(family: str, folders: list[Path]) -> None:
    run = open_run(folders, steps=1, ratio="0", sizing=SIZINGS[family])
    counts = served_images(run, family)
    assert len(counts) > 8
    assert max(counts) > 3


def test_marks_stand_before_and_between_tiles(folders: list[Path]) -> None:
    """As `replace_image_token` of Idefics3's processor writes them; every image with the tiles of its own."""
    run = open_run(folders, steps=1, ratio="0", sizing=SIZINGS["idefics3"])
    ids = run.job.spec.stream.tokenizer
    each, number = (SIDE // 7 // 2) ** 2, 0
    for plan, view in run.views(ModuleKind.BACKBONE):
        samples, tensors = plan.samples, tensors_of(run.prepare(plan, view))
        assert (tensors["token_ids"][tensors["embedding_slots"]] == ids.image).all()
        for at, sample in enumerate(view.items.tolist()):
            first, end = tensors["cu_lengths"][at : at + 2]
            tokens = tensors["token_ids"][first:end].tolist()
            assert len(tokens) == samples.tokens[sample]
            text = "".join(chr(token) for token in tokens)
            runs = re.findall(f"{chr(ids.boi)}(.*?){chr(ids.eoi)}", text, re.DOTALL)
            layouts = samples.image_layout[slice(*samples.image_offsets[sample : sample + 2])]  # type: ignore[index]
            assert len(runs) == len(layouts)
            for found, (rows, columns) in zip(runs, layouts[:, :2].tolist(), strict=True):
                assert found == expanded(rows, columns, chr(ids.image) * each)
                number += rows * columns > 1
    assert number > 3


def expanded(rows: int, columns: int, image: str) -> str:
    if rows * columns == 1:
        return f"{chr(210)}{chr(211)}{image}"
    lines = ["".join(f"{chr(210)}{chr(220 + r * 4 + c)}{image}" for c in range(columns)) for r in range(rows)]
    return chr(212).join(lines) + f"{chr(213)}{chr(210)}{chr(211)}{image}"


def test_statistics_are_kept_apart_by_tiles_and_marks() -> None:
    keys = [Rules("digest", Sizing.model_validate(fields)).key() for fields in SIZINGS.values()]
    unmarked = {**SIZINGS["idefics3"], "marks": None}
    keys.append(Rules("digest", Sizing.model_validate(unmarked)).key())
    assert all(keys.count(key) == 1 for key in keys)


def test_generators_learn_whole_pictures(folders: list[Path]) -> None:
    with pytest.raises(ValueError, match=r"sizing\.rule tiles cuts images, and generators learn whole ones"):
        open_run(folders, steps=1, ratio="0.5", sizing=SIZINGS["internvl"])


GOLDEN = {"onevision": "603a927b1e67d985", "internvl": "ce941a67eb42bac5", "idefics3": "2b4593155cde52ec"}
"""SHA-256 of the tokens and patches of all samples of a tiled job, in no order: the same in every release."""


@pytest.mark.parametrize("family", SIZINGS)
def test_ids_and_bytes_of_tiled_jobs_stay(family: str, folders: list[Path]) -> None:
    run, found = open_run(folders, steps=1, ratio="0", sizing=SIZINGS[family]), []
    for kind, name, ends in (
        (ModuleKind.BACKBONE, "token_ids", "cu_lengths"),
        (ModuleKind.ENCODER, "patches", "cu_patches"),
    ):
        for plan, view in run.views(kind):
            tensors = tensors_of(run.prepare(plan, view))
            bounds = pairwise(tensors[ends].tolist())
            found += [hashlib.sha256(np.ascontiguousarray(tensors[name][a:b])).hexdigest() for a, b in bounds]
    assert hashlib.sha256(" ".join(sorted(found)).encode()).hexdigest()[:16] == GOLDEN[family]
