"""Transforms that a job asks for: our own ones of pixels, and those that users install, of metadata, text and pixels.

Transforms of pixels change an image before it is cut into patches, each epoch anew. Patch grids come from the sizes in
the index, so every one leaves an image the grid of the whole. Ours are in `dataserver/images/transforms.py`, and what
runs those of users in `dataserver/transforms/`.
"""

import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Final, Literal, Self

from pydantic import Field, StrictBool, StrictInt, StrictStr, model_validator

from dataserver.planning.job.fields.values import MAX_INTEGER, DecimalString, Name, SpecModel, Version

MAX_TRANSFORMS: Final = 8
MAX_OPTIONS: Final = 32
LARGEST_SIGMA: Final = "0.25"
"""Largest blur, as a share of an image's shorter side: it leaves hardly more than the colours."""
SMALLEST_AREA: Final = "0.01"
"""A part of an image smaller than this is hardly a picture, and would be decoded at ten times the sides of the grid."""


class HorizontalFlip(SpecModel):
    """Mirror an image, left to right."""

    kind: Literal["horizontal_flip"]
    """Selects this transform."""
    probability: DecimalString = "0.5"
    """Share of the images that are mirrored."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if Fraction(self.probability) > 1:
            raise ValueError(f"probability is {self.probability}; a value in [0, 1] is required")
        return self


class RandomResizedCrop(SpecModel):
    """Cut out a part of an image that has the aspect of the whole, and scale it to the patch grid of the whole."""

    kind: Literal["random_resized_crop"]
    """Selects this transform."""
    min_area: DecimalString = "0.5"
    """Smallest share of the image's area that is cut out; shares between it and 1 are equally likely."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not Fraction(SMALLEST_AREA) <= Fraction(self.min_area) <= 1:
            raise ValueError(f"min_area is {self.min_area}; a value from {SMALLEST_AREA} to 1 is required")
        return self


OptionText = Annotated[StrictStr, Field(max_length=1024)]
OptionInteger = Annotated[StrictInt, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]


class ColorJitter(SpecModel):
    """Change brightness, contrast and saturation of an image; hues stay."""

    kind: Literal["color_jitter"]
    """Selects this transform."""
    brightness: DecimalString = "0.2"
    """Values are multiplied by a factor that is at most so far from 1."""
    contrast: DecimalString = "0.2"
    """Differences from the mean grey of the image are multiplied by a factor that is at most so far from 1."""
    saturation: DecimalString = "0.2"
    """Differences from the grey of a pixel are multiplied by a factor that is at most so far from 1."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("brightness", "contrast", "saturation"):
            if Fraction(getattr(self, name)) > 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a value in [0, 1] is required")
        return self


class GaussianBlur(SpecModel):
    """Blur an image."""

    kind: Literal["gaussian_blur"]
    """Selects this transform."""
    probability: DecimalString = "0.5"
    """Share of the images that are blurred."""
    max_sigma: DecimalString = "0.01"
    """Largest standard deviation, as a share of the shorter side; those up to it are equally likely."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if Fraction(self.probability) > 1:
            raise ValueError(f"probability is {self.probability}; a value in [0, 1] is required")
        if not 0 < Fraction(self.max_sigma) <= Fraction(LARGEST_SIGMA):
            raise ValueError(f"max_sigma is {self.max_sigma}; a value above 0, up to {LARGEST_SIGMA}, is required")
        return self


Options = Annotated[dict[Name, StrictBool | OptionInteger | OptionText], Field(max_length=MAX_OPTIONS)]


class InstalledTransform(SpecModel):
    """A transform of a package that is installed beside DistTrain, as the entry points of that package name it."""

    name: Name
    """Name of the entry point."""
    version: Version
    """Version of the package that has it."""
    options: Options | None = None
    """What the transform is given: booleans, integers and texts by their names. A fraction is written as text."""

    def key(self) -> str:
        """What tells transforms apart, in one line: a name has neither `=` nor space."""
        options = json.dumps(dict(self.options or {}), sort_keys=True, separators=(",", ":"))
        return f"{self.name}={self.version} {options}"


class InstalledPixels(InstalledTransform):
    """A transform of pixels that users install; servers need it, and the flag `--transform` of `dataserver serve`."""

    kind: Literal["installed"]
    """Selects this transform."""


def key_of(transforms: Sequence[InstalledTransform]) -> str:
    """What tells chains of transforms apart, in one line."""
    return "; ".join(transform.key() for transform in transforms)


InstalledTransforms = Annotated[tuple[InstalledTransform, ...], Field(min_length=1, max_length=MAX_TRANSFORMS)]
AnyTransform = HorizontalFlip | RandomResizedCrop | ColorJitter | GaussianBlur | InstalledPixels
Transforms = Annotated[
    tuple[Annotated[AnyTransform, Field(discriminator="kind")], ...], Field(min_length=1, max_length=MAX_TRANSFORMS)
]
