"""Pixels against those of transformers' image processors, on pictures of odd shapes, stored without loss."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from images.pictures import ASTRONAUT, decode, encode, join_patches
from PIL import Image
from transformers import CLIPImageProcessorPil, Qwen2VLImageProcessorPil, SiglipImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from dataserver.images import ImageShape
from dataserver.images.resampling import Target, needed, scales_columns_first, target_of, write_resampled
from dataserver.planning.job.fields import Resampling, Sizing, SizingRule
from dataserver.planning.stream.grids import patch_grid

BYTES: dict[str, Any] = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
SHAPES = ((512, 512), (333, 97), (41, 300), (29, 31), (507, 13), (3, 260))
LEAST_PSNR = 40.0


def served(image: Image.Image, sizing: Sizing, **encoding: Any) -> np.ndarray:
    """The picture that patches of an image show."""
    rows, columns = patch_grid(*image.size, sizing)
    data = encode(image, encoding.pop("format", "PNG"), **encoding)
    valid, patches = decode(data, ImageShape(*image.size, 1, rows, columns), sizing)
    assert valid
    return join_patches(patches, rows, columns, sizing.patch, sizing.merge)


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    """In decibels; infinite for equal pictures."""
    assert one.shape == other.shape
    error = float(((one.astype(float) - other) ** 2).mean())
    return float("inf") if error == 0 else 10 * float(np.log10(255**2 / error))


def require_equal(image: Image.Image, ours: np.ndarray, theirs: np.ndarray) -> None:
    """To the bit where all releases of Pillow scale rows first: not tall images, and not always those that get wider
    and less high."""
    taller = image.height > image.width or scales_columns_first(image.size, Target(*ours.shape[1::-1]))
    assert psnr(ours, theirs) > (LEAST_PSNR if taller else 200)


def sized(rule: SizingRule, resampling: Resampling | None = Resampling.BICUBIC, **fields: Any) -> Sizing:
    return Sizing.model_validate({"quality": "exact", "rule": rule, "resampling": resampling, **fields})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("patch", "least", "most"), [(14, 56 * 56, 28 * 28 * 60), (16, 256 * 256, 2**24)])
def test_qwen_gets_its_processors_pixels(shape: tuple[int, int], patch: int, least: int, most: int) -> None:
    image = ASTRONAUT.resize(shape)
    size = {"shortest_edge": least, "longest_edge": most}
    made = Qwen2VLImageProcessorPil(size=size, patch_size=patch)(image, **BYTES)
    patches = made["pixel_values"].reshape(-1, 3, 2, patch, patch)[:, :, 0].transpose(0, 2, 3, 1)
    rows, columns = made["image_grid_thw"][0, 1:].tolist()
    theirs = join_patches(patches.reshape(len(patches), -1).astype(np.uint8), rows, columns, patch, 2)
    ours = served(image, sized(SizingRule.QWEN, patch=patch, min_pixels=least, max_pixels=most))
    require_equal(image, ours, theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_naflex_gets_its_processors_pixels(shape: tuple[int, int]) -> None:
    image = ASTRONAUT.resize(shape)
    made = Siglip2ImageProcessorPil(patch_size=16, max_num_patches=64)(image, **BYTES)
    rows, columns = made["spatial_shapes"][0].tolist()
    patches = made["pixel_values"][0, : rows * columns].astype(np.uint8)
    sizing = sized(SizingRule.NAFLEX, Resampling.BILINEAR, patch=16, merge=1, max_patches=64)
    require_equal(image, served(image, sizing), join_patches(patches, rows, columns, 16, 1))
    ours = served(image, sizing.model_copy(update={"resampling": None}))
    assert psnr(ours, join_patches(patches, rows, columns, 16, 1)) > LEAST_PSNR


@pytest.mark.parametrize("shape", SHAPES)
def test_squares_are_the_processors(shape: tuple[int, int]) -> None:
    image = ASTRONAUT.resize(shape)
    siglip = SiglipImageProcessorPil(size={"height": 95, "width": 95})(image, **BYTES)["pixel_values"][0]
    ours = served(image, sized(SizingRule.SQUARE, patch=14, merge=1, side=95))  # six patches, and eleven pixels left
    assert psnr(ours, siglip.transpose(1, 2, 0)[:84, :84]) > LEAST_PSNR
    gemma = Gemma3ImageProcessorPil(size={"height": 112, "width": 112})(image, **BYTES)["pixel_values"][0]
    for resampling in (None, Resampling.BILINEAR):
        ours = served(image, sized(SizingRule.SQUARE, resampling, patch=14, merge=4, side=112))
        if resampling is None:
            assert psnr(ours, gemma.transpose(1, 2, 0)) > LEAST_PSNR
        else:
            require_equal(image, ours, gemma.transpose(1, 2, 0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("edge", [84, 96])
def test_crops_are_the_processors(shape: tuple[int, int], edge: int) -> None:
    image = ASTRONAUT.resize(shape)
    crop = {"height": 84, "width": 84}
    clip = CLIPImageProcessorPil(size={"shortest_edge": edge}, crop_size=crop)(image, **BYTES)["pixel_values"][0]
    ours = served(image, sized(SizingRule.CROP, patch=14, merge=1, side=84, shortest_edge=edge))
    off = np.abs(ours.astype(int) - clip.transpose(1, 2, 0))
    assert off.max() <= 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("background", [None, (127, 0, 255)])
def test_padded_squares_are_the_processors(shape: tuple[int, int], background: tuple[int, int, int] | None) -> None:
    image, crop = ASTRONAUT.resize(shape), {"height": 95, "width": 95}
    mean = {} if background is None else {"image_mean": [(value + 0.5) / 255 for value in background]}
    processor = LlavaImageProcessorPil(do_pad=True, size={"shortest_edge": 95}, crop_size=crop, **mean)
    llava = processor(image, **BYTES)["pixel_values"][0].transpose(1, 2, 0)
    sizing = {"patch": 14, "merge": 1, "side": 95}  # six patches, and eleven pixels left
    ours = served(image, sized(SizingRule.PAD, **sizing, background=background))
    assert np.abs(ours.astype(int) - llava[:84, :84]).max() <= 1
    if shape == (512, 512):
        squared = served(image, sized(SizingRule.SQUARE, **sizing))
        assert np.abs(ours.astype(int) - squared).max() <= 1, "it has no borders"
    fast = served(image, sized(SizingRule.PAD, **sizing, background=background, quality="fast"), format="JPEG")
    assert psnr(fast, ours) > 25, "a JPEG may be reduced before it is padded"


@pytest.mark.parametrize("resampling", Resampling)
@pytest.mark.parametrize(("size", "grid"), [((30, 200), (10, 2)), ((9, 70), (3, 2)), ((70, 9), (2, 3))])
def test_axes_are_scaled_one_after_the_other(
    size: tuple[int, int], grid: tuple[int, int], resampling: Resampling
) -> None:
    """In one order with all releases of Pillow, which have several: rows first, unless they grow and columns shrink."""
    pixels = np.random.default_rng(3).integers(0, 256, (size[1], size[0], 3), np.uint8)
    sizing = sized(SizingRule.QWEN, resampling, patch=7, merge=1, min_pixels=1, max_pixels=10**6)
    out, part = np.empty((grid[0] * grid[1], 147), np.uint8), (grid[1] * 7, grid[0] * 7)
    write_resampled(pixels, size, target_of(size, *grid, sizing), grid, sizing, out)
    number, image = {"lanczos": 1, "bilinear": 2, "bicubic": 3}[resampling], Image.fromarray(pixels)
    between = (size[0], part[1]) if size == (9, 70) else (part[0], size[1])
    expected = image.resize(between, number).resize(part, number)
    np.testing.assert_array_equal(join_patches(out, *grid, 7, 1), expected)


lengths = st.integers(1, 10**7)


@given(lengths, lengths, lengths, lengths, st.floats(0, 1), st.floats(0.001, 1))
@example(1, 2_000_000, 896, 896, 0, 1)
@example(1, 2_000_000, 896, 1_792_000_000, 0.5, 0.0000005)
def test_no_image_between_the_passes_is_much_larger_than_what_goes_in_or_comes_out(
    width: int, height: int, columns: int, rows: int, start: float, share: float
) -> None:
    """A share of the scaled image is wanted, in both directions."""
    part = max(1, int(columns * share)), max(1, int(rows * share))
    read = []
    for length, scaled, wanted in zip((width, height), (columns, rows), part, strict=True):
        first = int((scaled - wanted) * start) * length / scaled
        begin, end = needed(first, first + wanted * length / scaled, length, wanted)
        assert 0 <= begin < end <= length
        read.append(end - begin)
    is_first = scales_columns_first((width, height), Target(columns, rows))
    between = read[0] * part[1] if is_first else part[0] * read[1]
    assert between <= max(read[0] * read[1], part[0] * (part[1] + 2 * 4 + 2))


def test_a_turned_image_is_scaled_upright() -> None:
    upright, sizing = ASTRONAUT.resize((120, 300)), sized(SizingRule.CROP, patch=14, merge=1, side=84)
    stored = encode(upright.transpose(Image.Transpose.ROTATE_90), "PNG")  # orientation 6 turns it back
    valid, patches = decode(stored, ImageShape(120, 300, 6, 6, 6), sizing)
    assert valid
    np.testing.assert_array_equal(join_patches(patches, 6, 6, 14, 1), served(upright, sizing))


def test_a_jpeg_is_reduced_no_further_than_what_it_is_scaled_to() -> None:
    """The crop is half as large as what the whole image is scaled to."""
    wide, data = ASTRONAUT.resize((500, 125)), {"format": "JPEG", "quality": 95}
    for edge, least, most in ((112, 200, float("inf")), (56, 25, 60)):
        crop = {"patch": 14, "merge": 1, "side": 56, "shortest_edge": edge}
        fast, exact = (served(wide, sized(SizingRule.CROP, **crop, quality=q), **data) for q in ("fast", "exact"))
        assert least < psnr(fast, exact) <= most


def test_pixels_of_another_size_are_refused() -> None:
    sizing = sized(SizingRule.SQUARE, patch=14, merge=1, side=28)
    pixels, out = np.zeros((10, 10, 3), np.uint8), np.empty((4, 588), np.uint8)
    write_resampled(pixels, (80, 73), target_of((80, 73), 2, 2, sizing), (2, 2), sizing, out)
    with pytest.raises(ValueError, match=r"pixels of \(10, 10\) that are no scale of an image of \(41, 39\)"):
        write_resampled(pixels, (41, 39), target_of((41, 39), 2, 2, sizing), (2, 2), sizing, out)
