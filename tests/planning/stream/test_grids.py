"""Grids by the rules of image processors, against transformers' own functions."""

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from planning.kernels.interpreted import interpreted
from pydantic import ValidationError
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

from dataserver.planning.job.fields import Sizing
from dataserver.planning.kernels import sized
from dataserver.planning.stream.doubles import as_double, root_as_double
from dataserver.planning.stream.grids import patch_grid, patch_grids

NUMBER = 10_000
QWEN = [  # patch, merge, least and most pixels: released defaults, then users' limits
    (14, 2, 56 * 56, 28 * 28 * 1280),
    (14, 2, 56 * 56, 2**14 * 28 * 28),
    (16, 2, 256 * 256, 2**24),
    (14, 2, 256 * 28 * 28, 512 * 512),
    (14, 2, 56 * 56, 56 * 56),
]


def sizing_of(rule: str, **fields: Any) -> Sizing:
    return Sizing.model_validate({"rule": rule, **fields})


def random_sizes(longest: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Widths and heights, a quarter each of any, of squares, of halves of blocks, and small ones."""
    random = np.random.default_rng(seed)
    widths, heights = random.integers(1, longest, (2, NUMBER))
    kind = np.arange(NUMBER) % 4
    heights = np.where(kind == 1, widths, heights)
    widths = np.where(kind == 2, widths // 14 * 14 + 14, widths)
    widths, heights = (np.where(kind == 3, side % 100 + 1, side) for side in (widths, heights))
    return widths, np.clip(heights, -(-widths // 200), widths * 200)


@pytest.mark.parametrize(("patch", "merge", "least", "most"), QWEN)
def test_qwens_grids_are_those_of_smart_resize(patch: int, merge: int, least: int, most: int) -> None:
    sizing = sizing_of("qwen", patch=patch, merge=merge, min_pixels=least, max_pixels=most)
    widths, heights = random_sizes(6000, most)
    expected = [
        smart_resize(h, w, patch * merge, least, most) for w, h in zip(widths.tolist(), heights.tolist(), strict=True)
    ]
    rows, columns = patch_grids(widths, heights, sizing)
    np.testing.assert_array_equal(np.stack([rows, columns], 1) * patch, expected)
    assert (rows * columns).max() <= sizing.max_patches


@pytest.mark.parametrize(("patch", "most"), [(16, 256), (14, 1024)])
def test_naflex_grids_are_those_of_siglip_2(patch: int, most: int) -> None:
    widths, heights = random_sizes(4000, most)
    sizes = zip(heights.tolist(), widths.tolist(), strict=True)
    expected = [get_image_size_for_max_num_patches(h, w, patch, most) for h, w in sizes]
    found = patch_grids(widths, heights, sizing_of("naflex", patch=patch, merge=1, max_patches=most))
    np.testing.assert_array_equal(np.stack(found, 1) * patch, expected)


sides = st.one_of(st.integers(1, 3000), st.integers(1, 2**31 - 1))
RULES = [
    sizing_of("qwen", min_pixels=3136, max_pixels=1003520),
    sizing_of("qwen", patch=1, merge=1, min_pixels=1, max_pixels=1),
    sizing_of("qwen", patch=256, merge=16, min_pixels=2**31, max_pixels=2**31),
    sizing_of("qwen", patch=47, merge=1, min_pixels=2**31, max_pixels=2**31),
    sizing_of("naflex", merge=1, max_patches=256),
    sizing_of("naflex", patch=1, merge=1, max_patches=1),
    sizing_of("square", side=56),
    sizing_of("crop", side=56, resampling="bicubic"),
]


@given(width=sides, height=sides, sizing=st.sampled_from(RULES))
@example(width=2**31 - 1, height=2**31 - 1, sizing=RULES[4])
@example(width=1, height=2**31 - 1, sizing=RULES[2])
@example(width=2**31 - 1, height=1, sizing=RULES[0])
def test_grids_of_any_image_are_legal(width: int, height: int, sizing: Sizing) -> None:
    rows, columns = patch_grid(width, height, sizing)
    assert min(rows, columns) >= sizing.merge
    assert rows % sizing.merge == columns % sizing.merge == 0
    assert rows * columns <= sizing.max_patches


def test_longer_images_than_processors_take_count_as_the_longest() -> None:
    sizing = sizing_of("qwen", min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
    assert patch_grid(100_000, 10, sizing) == patch_grid(2000, 10, sizing)
    assert patch_grid(10, 2001, sizing) == patch_grid(10, 2000, sizing)


def test_fixed_sides_make_fixed_grids() -> None:
    for sizing in (sizing_of("square", patch=14, merge=1, side=384, resampling="bicubic"), RULES[-1]):
        grids = {patch_grid(width, height, sizing) for width, height in ((1, 1), (3000, 2), (336, 336))}
        assert grids == {(int(sizing.max_patches**0.5),) * 2}
    assert sizing_of("square", patch=14, merge=1, side=384, resampling="bicubic").max_patches == 27 * 27


def test_kernels_are_the_same_as_plain_python() -> None:
    plain, (widths, heights) = interpreted("sized"), random_sizes(3000, 0)
    few = widths[:200], heights[:200]
    for name, of_rule in (("qwen_grids", (28, 3136, 50_000, 200)), ("naflex_grids", (16, 256))):
        for one, other in zip(getattr(plain, name)(*few, *of_rule), getattr(sized, name)(*few, *of_rule), strict=True):
            np.testing.assert_array_equal(one, other)


@given(st.integers(1, 2**70), st.integers(1, 2**70))
@example(2**53 + 1, 1)
@example(2**53 - 1, 2**53)
@example((2**53 - 1) ** 2, 2**106)
def test_fractions_are_rounded_as_doubles(numerator: int, denominator: int) -> None:
    value = Fraction(numerator, denominator)
    assert as_double(value) == Fraction(numerator / denominator)
    double = as_double(value)
    assert root_as_double(double) == Fraction(math.sqrt(float(double)))


def test_the_field_that_bounds_patches_is_one_that_jobs_may_lower() -> None:
    for fields in (
        {"rule": "qwen", "min_pixels": 784, "max_pixels": 784 * 64},
        {"rule": "naflex", "merge": 1, "max_patches": 64},
        {"rule": "square", "side": 280},
        {"rule": "crop", "side": 280, "resampling": "bicubic"},
        {},
    ):
        sizing = Sizing.model_validate(fields)
        value = getattr(sizing, sizing.bounded_by) // 2
        assert Sizing.model_validate({**fields, sizing.bounded_by: value}).max_patches < sizing.max_patches


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"rule": "qwen", "min_pixels": 4}, "rule qwen has no max_pixels; state what preprocessor_config"),
        ({"rule": "qwen", "min_pixels": 5, "max_pixels": 4}, "min_pixels is 5 and max_pixels 4"),
        ({"rule": "qwen", "min_pixels": 4, "max_pixels": 5, "side": 14}, "rule qwen has no use for side; leave it out"),
        ({"rule": "qwen", "min_pixels": 4, "max_pixels": 784, "max_patches": 9}, "max_patches is 9, and .* makes it"),
        ({"rule": "qwen", "patch": 1, "min_pixels": 4, "max_pixels": 2**31}, "images of 2147483648 patches; at most"),
        ({"rule": "naflex"}, "merge is 2; the grids of rule naflex are whole for merge 1 alone"),
        ({"rule": "square"}, "rule square has no side"),
        ({"rule": "square", "side": 27}, "side is 27, which makes 1 patches of 14; a positive multiple of merge 2"),
        ({"rule": "square", "side": 30}, "resampling is not stated; .* needs bilinear, bicubic, lanczos"),
        ({"rule": "crop", "side": 28}, "resampling is not stated; rule crop with side 28"),
        ({"rule": "crop", "side": 28, "shortest_edge": 27}, "shortest_edge is 27; at least side 28"),
        ({"min_pixels": 4, "side": 28}, "a sizing without rule has no use for min_pixels, side; leave them out"),
        ({"rule": "pad", "side": 28}, "resampling is not stated; rule pad with side 28"),
        ({"rule": "crop", "side": 28, "background": [0, 0, 0]}, "rule crop has no use for background; leave it out"),
        ({"rule": "pad", "side": 28, "background": [0, 0, 256]}, "less than or equal to 255"),
        ({"rule": "tiles"}, "rule tiles has no side and no tiles; state what preprocessor_config.json has"),
        ({"rule": ["qwen"]}, "Input should be"),
        ({"rule": "qwen", "min_pixels": "4", "max_pixels": 5}, "min_pixels"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Sizing.model_validate_json(json.dumps(fields), strict=True)
