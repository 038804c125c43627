"""RandAugment (arXiv 1909.13719): a few of 14 operations, drawn for each image, by the functions of Pillow.

Operations and magnitudes are those of torchvision's `RandAugment` for images of Pillow. Magnitudes are computed as
fractions, so that they are alike on all machines.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Final, NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from dataserver.images.patches import U8
from dataserver.planning.job.fields import Interpolation, RandAugment

_BITS: Final = 64
_FILTERS: Final = {
    Interpolation.NEAREST: Image.Resampling.NEAREST,
    Interpolation.BILINEAR: Image.Resampling.BILINEAR,
}


class Operation(NamedTuple):
    """One of the operations that RandAugment draws from."""

    apply: Callable[[Image.Image, Fraction, RandAugment], Image.Image]
    """Takes an image, the magnitude with its sign, and the options; returns an image of the same size."""
    most: Fraction = Fraction(0)
    """The strongest magnitude; the weakest one is 0."""
    is_signed: bool = False
    """Whether half of the images have the negative magnitude."""


def _mapped(image: Image.Image, matrix: tuple[float, ...], options: RandAugment) -> Image.Image:
    """The image whose pixel (x, y) is what lies at matrix * (x, y, 1)."""
    how = _FILTERS[options.interpolation]
    return image.transform(image.size, Image.Transform.AFFINE, matrix, how, fillcolor=options.fill)


def _identity(image: Image.Image, _magnitude: Fraction, _options: RandAugment) -> Image.Image:
    return image


def _shear_x(image: Image.Image, magnitude: Fraction, options: RandAugment) -> Image.Image:
    return _mapped(image, (1, float(magnitude), 0, 0, 1, 0), options)


def _shear_y(image: Image.Image, magnitude: Fraction, options: RandAugment) -> Image.Image:
    return _mapped(image, (1, 0, 0, float(magnitude), 1, 0), options)


def _translate_x(image: Image.Image, magnitude: Fraction, options: RandAugment) -> Image.Image:
    return _mapped(image, (1, 0, -int(magnitude * image.width), 0, 1, 0), options)


def _translate_y(image: Image.Image, magnitude: Fraction, options: RandAugment) -> Image.Image:
    return _mapped(image, (1, 0, 0, 0, 1, -int(magnitude * image.height)), options)


def _rotate(image: Image.Image, magnitude: Fraction, options: RandAugment) -> Image.Image:
    return image.rotate(float(magnitude), _FILTERS[options.interpolation], fillcolor=options.fill)


def _brightness(image: Image.Image, magnitude: Fraction, _options: RandAugment) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(float(1 + magnitude))


def _color(image: Image.Image, magnitude: Fraction, _options: RandAugment) -> Image.Image:
    return ImageEnhance.Color(image).enhance(float(1 + magnitude))


def _contrast(image: Image.Image, magnitude: Fraction, _options: RandAugment) -> Image.Image:
    return ImageEnhance.Contrast(image).enhance(float(1 + magnitude))


def _sharpness(image: Image.Image, magnitude: Fraction, _options: RandAugment) -> Image.Image:
    return ImageEnhance.Sharpness(image).enhance(float(1 + magnitude))


def _posterize(image: Image.Image, magnitude: Fraction, _options: RandAugment) -> Image.Image:
    return ImageOps.posterize(image, 8 - round(magnitude))


def _solarize(image: Image.Image, magnitude: Fraction, _options: RandAugment) -> Image.Image:
    return ImageOps.solarize(image, float(255 - magnitude))  # type: ignore[arg-type]  # compares with it alone


def _auto_contrast(image: Image.Image, _magnitude: Fraction, _options: RandAugment) -> Image.Image:
    return ImageOps.autocontrast(image)


def _equalize(image: Image.Image, _magnitude: Fraction, _options: RandAugment) -> Image.Image:
    return ImageOps.equalize(image)


_SHEAR: Final = Fraction(3, 10)
_TRANSLATION: Final = Fraction(150, 331)
_ENHANCEMENT: Final = Fraction(9, 10)
OPERATIONS: Final = (
    Operation(_identity),
    Operation(_shear_x, _SHEAR, is_signed=True),
    Operation(_shear_y, _SHEAR, is_signed=True),
    Operation(_translate_x, _TRANSLATION, is_signed=True),
    Operation(_translate_y, _TRANSLATION, is_signed=True),
    Operation(_rotate, Fraction(30), is_signed=True),
    Operation(_brightness, _ENHANCEMENT, is_signed=True),
    Operation(_color, _ENHANCEMENT, is_signed=True),
    Operation(_contrast, _ENHANCEMENT, is_signed=True),
    Operation(_sharpness, _ENHANCEMENT, is_signed=True),
    Operation(_posterize, Fraction(4)),
    Operation(_solarize, Fraction(255)),
    Operation(_auto_contrast),
    Operation(_equalize),
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
