"""Random transforms of pixels: a line of `TRANSFORMS` for each kind that a job may name.

A transform is a pure function of an image's pixels, its options and a few words that were drawn for this image in this
epoch, so every server makes the same bytes of it, also after a resume. It works before images are scaled: what it
returns is scaled to the patch grid of the whole image, whatever its size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np

from dataserver.images.patches import U8
from dataserver.planning.job.fields import (
    ColorJitter,
    GaussianBlur,
    HorizontalFlip,
    RandAugment,
    RandomResizedCrop,
    SpecModel,
)

TRANSFORM_WORDS: Final = 4
"""Words of 64 bits that are drawn for each transform of an image."""
_BITS: Final = 64
_ONE: Final = 1 << 16
_GREY: Final = (Fraction(299, 1000), Fraction(587, 1000), Fraction(114, 1000))
"""Shares of red, green and blue in the grey of a pixel (ITU-R 601)."""
_ROWS: Final = 32
"""That are changed at a time, so that what lies in between stays in a core's caches."""
_BOX: Final = 256


@dataclass(frozen=True, slots=True)
class DrawnTransform:
    """A transform of one image in one epoch."""

    options: SpecModel
    words: tuple[int, ...]
    """`TRANSFORM_WORDS` uniform numbers in [0, 2^64)."""
    by: Callable[[U8, Any, Sequence[int]], U8] | None = None
    """What applies it, where a user installed it; else `TRANSFORMS` has it. It keeps the shape of the pixels."""


def _whole(_options: Any) -> Fraction:
    return Fraction(1)


@dataclass(frozen=True, slots=True)
class ImageTransform:
    """How one kind of transform is applied to an image."""

    apply: Callable[[U8, Any, Sequence[int]], U8]
    """Takes upright pixels, uint8 [height, width, 3], which it does not change, the options and the words. Returns
    uint8 [any, any, 3], which may be a view of the pixels."""
    least_area: Callable[[Any], Fraction] = _whole
    """The least share of an image's area that it leaves, by its options: so much more is decoded."""


def horizontal_flip(pixels: U8, options: HorizontalFlip, words: Sequence[int]) -> U8:
    """Mirror the image with the probability that the options give."""
    return pixels[:, ::-1] if words[0] < Fraction(options.probability) * 2**_BITS else pixels


def random_resized_crop(pixels: U8, options: RandomResizedCrop, words: Sequence[int]) -> U8:
    """Cut out a part: its area is drawn first, then its top and its left. In integers, alike on all machines."""
    least = Fraction(options.min_area)
    area = int(least * 2**_BITS + (1 - least) * words[0])
    height, width = (max(1, math.isqrt(side**2 * area >> _BITS)) for side in pixels.shape[:2])
    top, left = (
        word * (side - part + 1) >> _BITS
        for word, side, part in zip(words[1:3], pixels.shape[:2], (height, width), strict=True)
    )
    return pixels[top : top + height, left : left + width]


def color_jitter(pixels: U8, options: ColorJitter, words: Sequence[int]) -> U8:
    """Multiply brightness, contrast and saturation by factors that are drawn in this order; then turn hues.

    The three are one affine map of a pixel's colours, in integers of 16 bits behind the point; it is cut to 0 to 255 at
    its end alone.
    """
    shares = map(Fraction, (options.brightness, options.contrast, options.saturation))
    bright, contrast, color = (
        1 - share + 2 * share * Fraction(word, 2**_BITS) for share, word in zip(shares, words[:3], strict=True)
    )
    sums = pixels.reshape(-1, 3).sum(axis=0, dtype=np.int64).tolist()
    mean = sum(weight * total for weight, total in zip(_GREY, sums, strict=True)) / (pixels.shape[0] * pixels.shape[1])
    offset = round((1 - contrast) * bright * mean * _ONE) + _ONE // 2
    matrix = [
        [round(contrast * bright * _ONE * (color * (i == j) + (1 - color) * grey)) for j, grey in enumerate(_GREY)]
        for i in range(3)
    ]
    made = np.empty_like(pixels, order="C")
    for top in range(0, len(pixels), _ROWS):
        red, green, blue = np.moveaxis(pixels[top : top + _ROWS].astype(np.int32), 2, 0)
        for channel, (of_red, of_green, of_blue) in enumerate(matrix):
            values = (red * of_red + green * of_green + blue * of_blue + offset) >> 16
            made[top : top + _ROWS, :, channel] = values.clip(0, 255)
    if options.hue is None:
        return made
    return _turned(made, Fraction(options.hue) * (2 * Fraction(words[3], 2**_BITS) - 1))


def _turned(pixels: U8, share: Fraction) -> U8:
    """Turn hues by a share of a whole turn, in Pillow's HSV and whole 255ths, as torchvision does."""
    from PIL import Image

    hue, saturation, value = Image.fromarray(pixels).convert("HSV").split()
    turned = Image.fromarray(np.asarray(hue) + np.uint8(int(share * 255) % 256))
    return np.asarray(Image.merge("HSV", (turned, saturation, value)).convert("RGB"))


def gaussian_blur(pixels: U8, options: GaussianBlur, words: Sequence[int]) -> U8:
    """Blur as three means over boxes do whose variances add up to that of the drawn deviation, as Pillow's own blur."""
    if words[0] >= Fraction(options.probability) * 2**_BITS:
        return pixels
    from PIL import Image, ImageFilter

    sigma = Fraction(options.max_sigma) * min(pixels.shape[:2]) * Fraction(words[1], 2**_BITS)
    width = math.isqrt(int((4 * sigma**2 + 1) * _BOX**2))  # of a box, in 256ths of a pixel
    blurred = Image.fromarray(np.ascontiguousarray(pixels))
    for _ in range(3):
        blurred = blurred.filter(ImageFilter.BoxBlur((width - _BOX) / (2 * _BOX)))
    return np.asarray(blurred)


def rand_augment(pixels: U8, options: RandAugment, words: Sequence[int]) -> U8:
    """Apply operations that are drawn, as `dataserver/images/rand_augment.py` says."""
    from dataserver.images.rand_augment import augmented

    return augmented(pixels, options, words)


TRANSFORMS: Final[dict[type[SpecModel], ImageTransform]] = {
    HorizontalFlip: ImageTransform(horizontal_flip),
    RandomResizedCrop: ImageTransform(random_resized_crop, lambda options: Fraction(options.min_area)),
    ColorJitter: ImageTransform(color_jitter),
    GaussianBlur: ImageTransform(gaussian_blur),
    RandAugment: ImageTransform(rand_augment),
}
"""Kinds of transforms by the options that a job has for it."""


def transform(pixels: U8, drawn: Sequence[DrawnTransform]) -> U8:
    """Apply transforms one after the other to upright pixels, uint8 [height, width, 3]; the result may be a view.

    Raises:
        TransformFailedError: one that a user installed cannot transform this image.
        TransformUnavailableError: one took too long, which says nothing about the image.
    """
    for step in drawn:
        apply = step.by or TRANSFORMS[type(step.options)].apply
        pixels = apply(pixels, step.options, step.words)
    return pixels


def _least_area(step: DrawnTransform) -> Fraction:
    return Fraction(1) if step.by else TRANSFORMS[type(step.options)].least_area(step.options)


def enlarged(goal: tuple[int, int], drawn: Sequence[DrawnTransform]) -> tuple[int, int]:
    """The (width, height) that has to be decoded so that what transforms leave still covers the goal: each side divided
    by the root of their least area, rounded up. In integers, alike on all machines."""
    area = math.prod((_least_area(step) for step in drawn), start=Fraction(1))
    width, height = (math.isqrt(math.ceil(side**2 / area) - 1) + 1 for side in goal)
    return width, height
