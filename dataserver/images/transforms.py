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

from dataserver.images.patches import U8
from dataserver.planning.job.fields import HorizontalFlip, RandomResizedCrop, SpecModel

TRANSFORM_WORDS: Final = 4
"""Words of 64 bits that are drawn for each transform of an image."""
_BITS: Final = 64


@dataclass(frozen=True, slots=True)
class DrawnTransform:
    """A transform of one image in one epoch."""

    options: SpecModel
    words: tuple[int, ...]
    """`TRANSFORM_WORDS` uniform numbers in [0, 2^64)."""


def _whole(_options: Any) -> Fraction:
    return Fraction(1)


@dataclass(frozen=True, slots=True)
class ImageTransform:
    """One kind of transform."""

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


TRANSFORMS: Final[dict[type[SpecModel], ImageTransform]] = {
    HorizontalFlip: ImageTransform(horizontal_flip),
    RandomResizedCrop: ImageTransform(random_resized_crop, lambda options: Fraction(options.min_area)),
}
"""By the options that a job has for it."""


def transform(pixels: U8, drawn: Sequence[DrawnTransform]) -> U8:
    """Apply transforms one after the other to upright pixels, uint8 [height, width, 3]; the result may be a view."""
    for step in drawn:
        pixels = TRANSFORMS[type(step.options)].apply(pixels, step.options, step.words)
    return pixels


def enlarged(goal: tuple[int, int], drawn: Sequence[DrawnTransform]) -> tuple[int, int]:
    """The (width, height) that has to be decoded so that what transforms leave still covers the goal: each side divided
    by the root of their least area, rounded up. In integers, alike on all machines."""
    area = math.prod((TRANSFORMS[type(step.options)].least_area(step.options) for step in drawn), start=Fraction(1))
    width, height = (math.isqrt(math.ceil(side**2 / area) - 1) + 1 for side in goal)
    return width, height
