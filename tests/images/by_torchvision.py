"""RandAugment and turned hues against torchvision's functions for images of Pillow: run by an interpreter that has it.

Writes a line of JSON: how many comparisons there were, and those that differ.
"""

import json
import sys
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image
from skimage import data as photographs

from dataserver.images.rand_augment import OPERATIONS
from dataserver.images.transforms import DrawnTransform, transform
from dataserver.planning.job.fields import ColorJitter, Interpolation, RandAugment

_REGISTRATIONS = "torchvision._meta_registrations"
"""Shapes of operators that only its build for GPUs registers."""
_FILL = (9, 99, 199)
_BINS = 31


def main() -> None:
    """Compare all operations, both signs, some magnitudes and shapes."""
    sys.modules[_REGISTRATIONS] = ModuleType(_REGISTRATIONS)
    whole = photographs.astronaut()
    shapes = whole[:200, :301], whole[100:105, 100:103], whole[200:201, 300:301], np.full((7, 5, 3), 77, np.uint8)
    found = [one for pixels in shapes for one in (*_operations(pixels), *_hues(pixels))]
    off = [name for name, is_equal in found if not is_equal]
    sys.stdout.write(json.dumps({"compared": len(found), "off": off}))


def _operations(pixels: Any) -> Iterator[tuple[str, bool]]:
    """What was compared, and whether it is equal."""
    from torchvision.transforms import InterpolationMode, autoaugment

    space = autoaugment.RandAugment()._augmentation_space(_BINS, pixels.shape[:2])
    sides = {"TranslateX": pixels.shape[1], "TranslateY": pixels.shape[0]}
    for number, (name, (magnitudes, signed)) in enumerate(space.items()):
        most = OPERATIONS[number].most * sides.get(name, 1)
        yield name, signed == OPERATIONS[number].is_signed
        for step, negative, how in product((0, 1, 9, 17, _BINS - 1), (False, True), Interpolation):
            theirs = float(magnitudes[step]) if magnitudes.ndim else 0.0  # in 24 bits
            exact = float(most * Fraction(step, _BINS - 1))
            if name in ("Posterize", "Solarize"):
                exact = 8 - round(exact) if name == "Posterize" else 255 - exact
            yield f"{name}'s magnitude {step}", abs(theirs - exact) <= 1e-6 * max(abs(exact), 1)
            signs = -exact if negative and signed else exact
            made = autoaugment._apply_op(Image.fromarray(pixels), name, signs, InterpolationMode[how.name], list(_FILL))
            ours = transform(pixels, [DrawnTransform(_options(step, how), (_word(number, negative),))])
            yield f"{name} {signs} {how} {pixels.shape}", np.array_equal(ours, np.asarray(made))


def _hues(pixels: Any) -> Iterator[tuple[str, bool]]:
    """As `_operations`; no turn is a whole number of 255ths, which fractions and floats would tell apart."""
    from torchvision.transforms import functional

    for word in range(0, 2**64, 2**64 // 41):
        share = float(Fraction(2 * word, 2**64) - 1) / 2
        ours = transform(pixels, [DrawnTransform(_HUES, (0, 0, 0, word))])
        theirs = functional.adjust_hue(Image.fromarray(pixels), share)
        yield f"hue {share} {pixels.shape}", np.array_equal(ours, np.asarray(theirs))


_HUES: Any = ColorJitter(kind="color_jitter", brightness="0", contrast="0", saturation="0", hue="0.5")


def _options(step: int, interpolation: Interpolation) -> RandAugment:
    return RandAugment(
        kind="rand_augment",
        num_ops=1,
        magnitude=step,
        num_magnitude_bins=_BINS,
        interpolation=interpolation,
        fill=_FILL,
    )


def _word(number: int, negative: int) -> int:
    return ((2 * number + negative) << 64) // 28 + 1


if __name__ == "__main__":
    main()
