"""RandAugment (arXiv 1909.13719): a few of 14 operations, drawn for each image, by the functions of Pillow.

Operations and magnitudes are those of torchvision's `RandAugment` for images of Pillow. Magnitudes are computed as
fractions, so that they are alike on all machines.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Final, NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from dataserver.images.patches import U8
from dataserver.planning.job.fields import Interpolation, RandAugment

_BITS: Final = 64
_FILTERS: Final = {
    Interpolation.NEAREST: Image.Resampling.NEAREST,
    Interpolation.BILINEAR: Image.Resampling.BILINEAR,
}


Apply = Callable[[Image.Image, Fraction, RandAugment], Image.Image]
"""Takes an image, the magnitude with its sign, and the options; returns an image of the same size."""


class Operation(NamedTuple):
    """One of the operations that RandAugment draws from."""

    apply: Apply
    most: Fraction = Fraction(0)
    """The strongest magnitude; the weakest one is 0."""
    is_signed: bool = False
    """Whether half of the images have the negative magnitude."""


def _mapped(matrix: Callable[[Image.Image, Fraction], tuple[float, ...]]) -> Apply:
    """Makes an image whose pixel (x, y) is what lies at matrix * (x, y, 1)."""

    def apply(image: Image.Image, magnitude: Fraction, options: RandAugment) -> Image.Image:
        how = _FILTERS[options.interpolation]
        of = matrix(image, magnitude)
        return image.transform(image.size, Image.Transform.AFFINE, of, how, fillcolor=options.fill)

    return apply


def _enhanced(kind: Callable[[Image.Image], Any]) -> Apply:
    return lambda image, magnitude, _: kind(image).enhance(float(1 + magnitude))


def _rotate(image: Image.Image, magnitude: Fraction, options: RandAugment) -> Image.Image:
    return image.rotate(float(magnitude), _FILTERS[options.interpolation], fillcolor=options.fill)


def _solarize(image: Image.Image, magnitude: Fraction, _options: RandAugment) -> Image.Image:
    return ImageOps.solarize(image, float(255 - magnitude))  # type: ignore[arg-type]  # compares with it alone


_SHEAR: Final = Fraction(3, 10)
_TRANSLATION: Final = Fraction(150, 331)
_ENHANCEMENT: Final = Fraction(9, 10)
OPERATIONS: Final = (
    Operation(lambda image, _, __: image),
    Operation(_mapped(lambda _, shear: (1, float(shear), 0, 0, 1, 0)), _SHEAR, is_signed=True),
    Operation(_mapped(lambda _, shear: (1, 0, 0, float(shear), 1, 0)), _SHEAR, is_signed=True),
    Operation(_mapped(lambda image, share: (1, 0, -int(share * image.width), 0, 1, 0)), _TRANSLATION, is_signed=True),
    Operation(_mapped(lambda image, share: (1, 0, 0, 0, 1, -int(share * image.height))), _TRANSLATION, is_signed=True),
    Operation(_rotate, Fraction(30), is_signed=True),
    Operation(_enhanced(ImageEnhance.Brightness), _ENHANCEMENT, is_signed=True),
    Operation(_enhanced(ImageEnhance.Color), _ENHANCEMENT, is_signed=True),
    Operation(_enhanced(ImageEnhance.Contrast), _ENHANCEMENT, is_signed=True),
    Operation(_enhanced(ImageEnhance.Sharpness), _ENHANCEMENT, is_signed=True),
    Operation(lambda image, magnitude, _: ImageOps.posterize(image, 8 - round(magnitude)), Fraction(4)),
    Operation(_solarize, Fraction(255)),
    Operation(lambda image, _, __: ImageOps.autocontrast(image)),
    Operation(lambda image, _, __: ImageOps.equalize(image)),
)
"""Operations in the order in which they are drawn from, which is torchvision's."""


def augmented(pixels: U8, options: RandAugment, words: Sequence[int]) -> U8:
    """Apply as many operations as the options say: word i draws the i-th one, with its sign as the last bit."""
    share = Fraction(options.magnitude, options.num_magnitude_bins - 1)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    for word in words[: options.num_ops]:
        number, negative = divmod(word * 2 * len(OPERATIONS) >> _BITS, 2)
        operation = OPERATIONS[number]
        magnitude = operation.most * share
        image = operation.apply(image, -magnitude if negative and operation.is_signed else magnitude, options)
    return np.asarray(image)
