"""Tiles of images, and the tokens that they take, against the processors of transformers."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from transformers.image_processing_utils import select_best_resolution
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from dataserver.planning.costs.model import forward_ns
from dataserver.planning.job.fields import Cost, Sizing
from dataserver.planning.stream.grids import image_layouts, patch_grids
from dataserver.planning.stream.tiles import _aspect_in_doubles, floor_products, layout_tokens, mark_tokens, num_parts

FEW, MANY = 400, 10_000
GRIDS = [(rows, columns) for rows in range(1, 7) for columns in range(1, 7)]
ONEVISION = {"patch": 14, "merge": 1, "side": 384, "tiles": {"choice": "pinpoints", "grids": GRIDS, "max_tiles": 9}}
INTERNVL = {"patch": 14, "merge": 2, "side": 448, "tiles": {"choice": "aspect", "min_tiles": 1, "max_tiles": 12}}
IDEFICS3 = {"patch": 14, "merge": 2, "side": 364, "tiles": {"choice": "edge", "longest_edge": 1456}}
SMOLVLM = {"patch": 16, "merge": 4, "side": 512, "tiles": {"choice": "edge", "longest_edge": 2048}}


def sizing_of(fields: dict[str, Any]) -> Sizing:
    return Sizing.model_validate({"rule": "tiles", "resampling": "bicubic", **fields})


def random_sizes(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Widths and heights: any, multiples of 16, squares, small ones, and very long ones."""
    random = np.random.default_rng(seed)
    widths, heights = random.integers(1, 4000, (2, number))
    kind = np.arange(number) % 5
    heights = np.where(kind == 1, widths, heights)
    widths, heights = (np.where(kind == 2, side // 16 * 16 + 16, side) for side in (widths, heights))
    widths, heights = (np.where(kind == 3, side % 100 + 1, side) for side in (widths, heights))
    return widths, np.where(kind == 4, heights % 9 + 1, heights)


def by_onevision(width: int, height: int) -> tuple[int, int, int]:
    """Rows and columns of tiles, and tokens."""
    pinpoints = [[rows * 384, columns * 384] for rows, columns in GRIDS]
    of = SimpleNamespace(image_grid_pinpoints=pinpoints)
    processor = SimpleNamespace(image_processor=of, num_image_tokens=729, vision_aspect_ratio="anyres_max_9")
    processor._get_unpadded_features = lambda *sizes: LlavaOnevisionProcessor._get_unpadded_features(processor, *sizes)
    tokens = LlavaOnevisionProcessor._get_number_of_features(processor, height, width, 384, 384)
    best = select_best_resolution((height, width), pinpoints)
    return best[0] // 384, best[1] // 384, tokens


def by_internvl(width: int, height: int) -> tuple[int, int, int]:
    columns, rows = get_optimal_tiled_canvas.__wrapped__((height, width), (448, 448), 1, 12)
    parts = rows * columns + (rows * columns > 1)
    return rows, columns, 256 * parts


def by_idefics3(side: int, edge: int, each: int) -> Callable[[int, int], tuple[int, int, int]]:
    """As `resize_for_vision_encoder` and `split_images` have it."""

    def found(width: int, height: int) -> tuple[int, int, int]:
        image = np.broadcast_to(np.uint8(0), (3, height, width))
        height, width = get_resize_output_image_size(image, edge)
        aspect = width / height
        if width >= height:
            width = math.ceil(width / side) * side
            height = math.ceil(int(width / aspect) / side) * side
        else:
            height = math.ceil(height / side) * side
            width = math.ceil(int(height * aspect) / side) * side
        rows, columns = height // side, width // side
        return rows, columns, each * (rows * columns + (rows * columns > 1))

    return found


FAMILIES = {
    "onevision": (ONEVISION, by_onevision),
    "internvl": (INTERNVL, by_internvl),
    "idefics3": (IDEFICS3, by_idefics3(364, 1456, 169)),
    "smolvlm": (SMOLVLM, by_idefics3(512, 2048, 64)),
}


@pytest.mark.parametrize("number", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_and_tokens_are_the_processors(family: str, number: int) -> None:
    fields, processor = FAMILIES[family]
    sizing = sizing_of(fields)
    widths, heights = random_sizes(number, number)
    expected = np.array([processor(*size) for size in zip(widths.tolist(), heights.tolist(), strict=True)])
    layouts = image_layouts(widths, heights, np.ones(number, np.bool_), sizing)
    assert layouts is not None
    np.testing.assert_array_equal(layouts[:, :2], expected[:, :2])
    np.testing.assert_array_equal(layout_tokens(layouts, sizing), expected[:, 2])
    rows, columns = patch_grids(widths, heights, sizing)
    assert (rows.astype(np.int64) * columns).max() <= sizing.max_patches
    assert (rows == columns * num_parts(layouts, sizing.tiles)).all()  # type: ignore[arg-type]


def test_products_of_doubles() -> None:
    """Also where the quotient is rounded down, so that a whole product is not reached."""
    random = np.random.default_rng(1)
    factor, denominator = random.integers(1, 5000, (2, 4000))
    factor = np.where(np.arange(4000) % 2, factor, denominator)
    for numerator in (384, 1152, 2304, 4096, 448 * 5):
        expected = [int(f * (numerator / d)) for f, d in zip(factor.tolist(), denominator.tolist(), strict=True)]
        found = floor_products(factor, numerator, denominator)
        np.testing.assert_array_equal(found, expected)
        assert (found < factor * numerator // denominator).any()


def test_one_of_several_images_is_not_cut_by_onevision() -> None:
    sizing = sizing_of(ONEVISION)
    sides = np.array([640, 640])
    layouts = image_layouts(sides, sides * 2, np.array([True, False]), sizing)
    assert layouts is not None
    assert layout_tokens(layouts, sizing).tolist() == [by_onevision(640, 1280)[2], 730]
    assert num_parts(layouts, sizing.tiles).tolist() == [1 + layouts[0, 0] * layouts[0, 1], 1]  # type: ignore[arg-type]


def test_of_the_longest_images_a_row_and_a_column_are_left() -> None:
    """Where shrinking would leave less than one, which no model can scale to."""
    grids = [[64, 1], [1, 64]]
    fields = {"patch": 14, "merge": 1, "side": 28, "tiles": {"choice": "pinpoints", "grids": grids, "max_tiles": 1}}
    layouts = image_layouts(np.array([10, 640]), np.array([640, 10]), np.ones(2, np.bool_), sizing_of(fields))
    assert layouts is not None
    assert layouts[:, 2:].tolist() == [[128, 2, 16, 1], [2, 128, 1, 16]]


def test_images_that_are_never_cut_need_no_marks_of_tiles() -> None:
    sizing = sizing_of({**IDEFICS3, "tiles": {"choice": "edge", "longest_edge": 364}, "marks": {"alone": [1, 2]}})
    layouts = image_layouts(np.array([700]), np.array([40]), np.ones(1, np.bool_), sizing)
    assert mark_tokens(layouts, 1, sizing).tolist() == [2]


def test_marks_are_counted_by_rows_and_columns() -> None:
    """As `replace_image_token` of Idefics3 writes them, with a blank line of two tokens, and tags of two in row 2."""
    table = [[[5] * (2 if row == 1 else 1) for _ in range(4)] for row in range(4)]
    marks = {"alone": [1, 2], "tiles": table, "row_end": [7, 8], "whole": [7, 7, 1, 3]}
    sizing = sizing_of({**IDEFICS3, "marks": marks})
    layouts = np.array([[1, 1, 0, 0, 0, 0], [2, 3, 0, 0, 0, 0], [4, 4, 0, 0, 0, 0]], np.int32)
    assert mark_tokens(layouts, 3, sizing).tolist() == [2, 3 + 6 + 2 * 1 + 4, 12 + 8 + 2 * 3 + 4]
    square = Sizing.model_validate({"rule": "square", "side": 28, "patch": 7, "marks": {"alone": [1, 2]}})
    assert mark_tokens(None, 2, square).tolist() == [2, 2]


def test_the_patches_of_a_tile_attend_to_each_other_alone() -> None:
    whole, tiled = (Cost(linear_ps=1000, quadratic_fs=10**6, window=window) for window in (None, 100))
    sizes = np.array([50, 100, 700])
    assert forward_ns(whole, sizes).tolist() == [50 + 2500, 100 + 10_000, 700 + 490_000]
    assert forward_ns(tiled, sizes).tolist() == [50 + 2500, 100 + 10_000, 700 + 70_000]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"side": 28}, "sizing.rule tiles has no tiles"),
        ({"side": 28, "tiles": {"choice": "edge"}}, "choice edge has no longest_edge"),
        ({"side": 28, "tiles": {"choice": "edge", "longest_edge": 60}}, "an even multiple of side 28 is required"),
        ({"side": 56, "tiles": {"choice": "edge", "longest_edge": 3640}}, "65 times side 56; at most 64 tiles"),
        (
            {"side": 28, "tiles": {"choice": "aspect", "min_tiles": 9, "max_tiles": 2}},
            "max_tiles 2; the latter is less",
        ),
        ({"side": 28, "tiles": {"choice": "edge", "longest_edge": 56, "max_tiles": 2}}, "has no use for max_tiles"),
        ({**ONEVISION, "merge": 3}, "an embedding for each patch, merge 1"),
        ({**ONEVISION, "marks": {"alone": [1]}}, "no tokens between embeddings"),
        ({**IDEFICS3, "marks": {"alone": [1]}}, "marks.tiles has 0 rows of 0 tiles, .* up to 4 rows and 4 columns"),
        ({**ONEVISION, "resampling": None}, "resampling is not stated"),
        ({**IDEFICS3, "marks": {"tiles": [[[1]]]}}, "images have up to 4 rows and 4 columns"),
        ({**IDEFICS3, "marks": {"tiles": [[[1]], []]}}, "rows of one length"),
        ({**IDEFICS3, "max_patches": 7}, "max_patches is 7, and sizing.rule tiles makes it 11492; leave it out"),
        ({"rule": "square", "side": 28, "patch": 7, "tiles": IDEFICS3["tiles"]}, "has no use for tiles"),
        ({**INTERNVL, "patch": 1, "side": 1200, "merge": 1}, "at most 1048576 are possible"),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        sizing_of(fields)


def test_few_aspects_are_compared_in_doubles() -> None:
    """Those that lie in the middle between the two nearest grids alone, whatever the size."""
    sides = np.random.default_rng(2).integers(400, 4000, (2, 2000))
    widths, heights = np.append(sides, [[1280, 1281], [1024, 1024]], axis=1)
    _aspect_in_doubles.cache_clear()
    image_layouts(widths, heights, np.ones(2002, np.bool_), sizing_of(INTERNVL))
    assert 1 <= _aspect_in_doubles.cache_info().misses < 20
