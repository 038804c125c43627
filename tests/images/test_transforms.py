"""Random transforms of pixels: what they do, held against whole images that look so already, and the registry."""

import io
from fractions import Fraction
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from images.pictures import ASTRONAUT, encode, naive_patches, noise
from PIL import Image

from dataserver.images import ImageShape, decode_patches
from dataserver.images.patches import TRANSPOSED, UPRIGHT
from dataserver.images.transforms import TRANSFORMS, DrawnTransform, ImageTransform, enlarged, transform
from dataserver.planning.job.fields import (
    ColorJitter,
    GaussianBlur,
    HorizontalFlip,
    Quality,
    RandomResizedCrop,
    Sizing,
    SpecModel,
)

SIZING = Sizing(patch=4, merge=2, max_patches=64)
WORD = st.integers(0, 2**64 - 1)


def flip(probability: str = "1", word: int = 0) -> DrawnTransform:
    return DrawnTransform(HorizontalFlip(kind="horizontal_flip", probability=probability), (word, 0, 0, 0))


def crop(min_area: str, *words: int) -> DrawnTransform:
    return DrawnTransform(RandomResizedCrop(kind="random_resized_crop", min_area=min_area), (*words, 0))


def decoded(data: bytes, shape: ImageShape, *drawn: DrawnTransform, sizing: Sizing = SIZING) -> np.ndarray:
    out = np.full((shape.rows * shape.columns, sizing.patch**2 * 3), 171, np.uint8)
    assert decode_patches(data, shape, sizing, out, drawn)
    return out


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_an_image_is_mirrored_as_people_see_it(orientation: int) -> None:
    picture = noise("RGB", 16, 24)
    upright = UPRIGHT[orientation](np.asarray(picture))
    rows, columns = (4, 6) if orientation in TRANSPOSED else (6, 4)
    shape = ImageShape(4 * columns, 4 * rows, orientation, rows, columns)
    found = decoded(encode(picture, "PNG"), shape, flip())
    assert np.array_equal(found, naive_patches(upright[:, ::-1], 4, 2))
    assert np.array_equal(decoded(encode(picture, "PNG"), shape, flip("0")), naive_patches(upright, 4, 2))


def test_as_many_images_are_mirrored_as_the_probability_says() -> None:
    pixels = np.zeros((1, 2, 3), np.uint8)
    pixels[0, 0] = 1
    quarter = 1 << 62
    for word, mirrored in ((0, True), (quarter - 1, True), (quarter, False), (2**64 - 1, False)):
        assert bool(transform(pixels, [flip("0.25", word)])[0, 1, 0]) == mirrored


@given(WORD, WORD, WORD, st.sampled_from(["0.01", "0.3", "1"]))
def test_a_part_is_what_the_same_part_in_a_file_of_its_own_is(area: int, top: int, left: int, least: str) -> None:
    picture, shape = noise("RGB", 37, 29), ImageShape(37, 29, 1, 6, 8)
    share = Fraction(least) + (1 - Fraction(least)) * Fraction(area, 2**64)
    height, width = (
        max(n for n in range(1, side + 1) if n == 1 or Fraction(n, side) ** 2 <= share) for side in (29, 37)
    )
    y, x = top * (29 - height + 1) >> 64, left * (37 - width + 1) >> 64
    box = (x, y, x + width, y + height)
    assert 0 <= x <= x + width <= 37
    assert 0 <= y <= y + height <= 29
    alone = encode(picture.crop(box), "PNG")
    expected = decoded(alone, ImageShape(width, height, 1, 6, 8))
    assert np.array_equal(decoded(encode(picture, "PNG"), shape, crop(least, area, top, left)), expected)


def test_of_a_large_photograph_as_much_is_decoded_as_the_part_needs() -> None:
    """At an eighth of its size, which covers the grid of the whole, the part would be a blur."""
    data = encode(ASTRONAUT, "JPEG", quality=95)
    shape, part = ImageShape(512, 512, 1, 8, 8), crop("0.04", 0, 1 << 62, 1 << 63)
    sizing = Sizing(patch=8, merge=2, max_patches=64)
    fast = decoded(data, shape, part, sizing=sizing).astype(int)
    exact = decoded(data, shape, part, sizing=sizing.model_copy(update={"quality": Quality.EXACT})).astype(int)
    assert np.abs(fast - exact).mean() < 1.5
    small = Image.open(io.BytesIO(data)).reduce(8).crop((13, 25, 26, 38)).resize((64, 64))
    assert np.abs(naive_patches(np.asarray(small), 8, 2).astype(int) - exact).mean() > 10, "the test tells them apart"


def test_transforms_follow_each_other() -> None:
    picture, shape = noise("RGB", 32, 32), ImageShape(32, 32, 1, 8, 8)
    left_half = crop("0.25", 0, 0, 0)
    data = encode(picture, "PNG")
    first, then = decoded(data, shape, left_half, flip()), decoded(data, shape, flip(), left_half)
    corner = encode(picture.crop((0, 0, 16, 16)).transpose(Image.Transpose.FLIP_LEFT_RIGHT), "PNG")
    assert np.array_equal(first, decoded(corner, ImageShape(16, 16, 1, 8, 8)))
    assert not np.array_equal(first, then)


def jittered(pixels: np.ndarray, factors: tuple[float, float, float]) -> np.ndarray:
    """The long way, in floats."""
    bright, contrast, color = factors
    grey = pixels @ np.array([0.299, 0.587, 0.114])
    found = pixels * bright
    found = contrast * found + (1 - contrast) * bright * grey.mean()
    inner = contrast * bright * grey + (1 - contrast) * bright * grey.mean()
    return np.clip(color * found + (1 - color) * inner[..., None], 0, 255)


@given(st.tuples(WORD, WORD, WORD), st.sampled_from(["0", "0.4", "1"]))
def test_colours_are_changed_as_three_factors_say(words: tuple[int, int, int], share: str) -> None:
    options = ColorJitter(kind="color_jitter", brightness=share, contrast=share, saturation=share)
    pixels = np.asarray(noise("RGB", 41, 70))
    factors = [1 - float(share) + 2 * float(share) * word / 2**64 for word in words]
    found = transform(pixels, [DrawnTransform(options, (*words, 0))])
    assert found.shape == pixels.shape
    assert np.abs(found - jittered(pixels.astype(float), (factors[0], factors[1], factors[2]))).max() <= 1
    assert share != "0" or np.array_equal(found, pixels)


@pytest.mark.parametrize("share", ["0.01", "0.05", "0.1"])
def test_a_blur_has_the_deviation_that_was_drawn(share: str) -> None:
    """Of a square in the middle; half of the largest deviation is drawn."""
    pixels = np.zeros((201, 301, 3), np.uint8)
    pixels[90:111, 140:161] = 255
    options = GaussianBlur(kind="gaussian_blur", probability="1", max_sigma=share)
    found = transform(pixels, [DrawnTransform(options, (0, 1 << 63, 0, 0))])[..., 0].astype(float)
    sigma = float(share) * 201 / 2
    profile, where = found.sum(axis=1), np.arange(201)
    variance = (profile * (where - 100) ** 2).sum() / profile.sum()
    assert variance == pytest.approx((21**2 - 1) / 12 + sigma**2, rel=0.03)
    assert found.sum() == pytest.approx(21 * 21 * 255, rel=0.03)


def test_as_many_images_are_blurred_as_the_probability_says() -> None:
    pixels = np.asarray(noise("RGB", 60, 60))
    options = GaussianBlur(kind="gaussian_blur", probability="0.25", max_sigma="0.1")
    for word, blurred in (((1 << 62) - 1, True), (1 << 62, False)):
        found = transform(pixels, [DrawnTransform(options, (word, 1 << 63, 0, 0))])
        assert np.array_equal(found, pixels) != blurred


def test_what_cannot_be_decoded_is_invalid_with_transforms_too() -> None:
    data, out = encode(ASTRONAUT, "JPEG"), np.full((64, 48), 171, np.uint8)
    assert not decode_patches(data[: len(data) // 2], ImageShape(512, 512, 1, 8, 8), SIZING, out, [flip()])
    assert not out.any()


class Negative(SpecModel):
    """A transform that only this test knows."""

    kind: Literal["negative"]


def test_a_line_adds_a_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSFORMS, Negative, ImageTransform(lambda pixels, *_: 255 - pixels))
    picture, shape = noise("RGB", 16, 24), ImageShape(16, 24, 1, 6, 4)
    drawn = DrawnTransform(Negative(kind="negative"), (0, 0, 0, 0))
    found = decoded(encode(picture, "PNG"), shape, drawn, flip())
    assert np.array_equal(found, naive_patches(255 - np.asarray(picture)[:, ::-1], 4, 2))


@given(st.integers(1, 10**6), st.integers(10**4, 10**6))
def test_as_much_is_decoded_as_the_smallest_part_needs(side: int, area: int) -> None:
    share = Fraction(area, 10**6)
    width, height = enlarged((side, side), [crop(f"0.{area:06d}" if area < 10**6 else "1")])
    assert width == height
    assert (width - 1) ** 2 * share < side**2 <= width**2 * share
