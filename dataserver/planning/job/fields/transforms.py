"""Transforms that a job asks for: our own ones of pixels, and those that users install, of metadata, text and pixels.

Transforms of pixels change an image before it is cut into patches, each epoch anew. Patch grids come from the sizes in
the index, so every one leaves an image the grid of the whole. Ours are in `dataserver/images/transforms.py`, and what
runs those of users in `dataserver/transforms/`.
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Final, Literal, Self

from pydantic import Field, StrictBool, StrictInt, StrictStr, field_validator, model_validator

from dataserver.planning.job.fields.sizing import Colour
from dataserver.planning.job.fields.tiles import OF_JSON
from dataserver.planning.job.fields.values import MAX_INTEGER, DecimalString, Name, SpecModel, Version

MAX_TRANSFORMS: Final = 8
MAX_OPTIONS: Final = 32
LARGEST_SIGMA: Final = "0.25"
"""Largest blur, as a share of an image's shorter side: it leaves hardly more than the colours."""
SMALLEST_AREA: Final = "0.01"
"""A part of an image smaller than this is hardly a picture, and would be decoded at ten times the sides of the grid."""
MOST_OPS: Final = 4
"""Operations of one RandAugment: each takes a word of those that are drawn for it."""
MOST_BINS: Final = 1000


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
    """Cut out a part of an image with the aspect ratio of the whole, and scale it to the patch grid of the whole."""

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
    """Change brightness, contrast, saturation and, if wanted, hue of an image, in this order."""

    kind: Literal["color_jitter"]
    """Selects this transform."""
    brightness: DecimalString = "0.2"
    """Values are multiplied by a factor that differs from 1 by at most this."""
    contrast: DecimalString = "0.2"
    """Differences from the mean grey of the image are multiplied by a factor that differs from 1 by at most this."""
    saturation: DecimalString = "0.2"
    """Differences from the grey of a pixel are multiplied by a factor that differs from 1 by at most this."""
    hue: DecimalString | None = None
    """Hues are turned by at most this share of a whole turn, up to 0.5. By default they do not change."""

    @field_validator("hue")
    @classmethod
    def _turned(cls, hue: str | None) -> str | None:
        """A job whose hues stay is the job that says nothing of them."""
        return None if hue == "0" else hue

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("brightness", "contrast", "saturation"):
            if Fraction(getattr(self, name)) > 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a value in [0, 1] is required")
        if Fraction(self.hue or 0) > Fraction(1, 2):
            raise ValueError(f"hue is {self.hue}; a value in [0, 0.5] is required")
        return self


class GaussianBlur(SpecModel):
    """Blur an image by a Gaussian."""

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


class Interpolation(StrEnum):
    """How Pillow finds the colours of an image that it shears, shifts or rotates."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"


class RandAugment(SpecModel):
    """Apply some of 14 operations, drawn for each image with equal probabilities, all with one magnitude (arXiv
    1909.13719).

    Operations and magnitudes are those of torchvision's RandAugment: identity, shears, translations, rotation,
    brightness, color, contrast, sharpness, posterize, solarize, autocontrast, equalize.
    """

    kind: Literal["rand_augment"]
    """Selects this transform."""
    num_ops: Annotated[int, Field(ge=1, le=MOST_OPS)] = 2
    """Operations that are applied, one after the other; the same one may be drawn again."""
    magnitude: Annotated[int, Field(ge=0, lt=MOST_BINS)] = 9
    """How strong the operations are: from 0 to less than `num_magnitude_bins`. Signs are drawn."""
    num_magnitude_bins: Annotated[int, Field(ge=2, le=MOST_BINS)] = 31
    """Number of magnitudes, evenly spread from none to the strongest."""
    interpolation: Interpolation = Interpolation.NEAREST
    """How colours are found when an image is sheared, shifted or rotated."""
    fill: Annotated[tuple[Colour, Colour, Colour], OF_JSON] = (0, 0, 0)
    """Red, green and blue of areas outside the original image."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.magnitude >= self.num_magnitude_bins:
            raise ValueError(
                f"magnitude is {self.magnitude}; with num_magnitude_bins {self.num_magnitude_bins} a value from 0 to "
                f"{self.num_magnitude_bins - 1} is required"
            )
        return self


Options = Annotated[dict[Name, StrictBool | OptionInteger | OptionText], Field(max_length=MAX_OPTIONS)]


class InstalledTransform(SpecModel):
    """A transform of a package that is installed beside DistTrain, as the entry points of that package name it."""

    name: Name
    """Name of the entry point."""
    version: Version
    """Version of the package that has it."""
    options: Options | None = None
    """What the transform gets: booleans, integers and texts by their names. Write a fraction as text."""

    def key(self) -> str:
        """What tells transforms apart, in one line: a name has neither `=` nor space."""
        options = json.dumps(dict(self.options or {}), sort_keys=True, separators=(",", ":"))
        return f"{self.name}={self.version} {options}"


class InstalledPixels(InstalledTransform):
    """A transform of pixels that users install. Servers must have it installed and permitted by the flag `--transform`
    of `dataserver serve`."""

    kind: Literal["installed"]
    """Selects this transform."""


def key_of(transforms: Sequence[InstalledTransform]) -> str:
    """What tells chains of transforms apart, in one line."""
    return "; ".join(transform.key() for transform in transforms)


InstalledTransforms = Annotated[tuple[InstalledTransform, ...], Field(min_length=1, max_length=MAX_TRANSFORMS)]
AnyTransform = HorizontalFlip | RandomResizedCrop | ColorJitter | GaussianBlur | RandAugment | InstalledPixels
Transforms = Annotated[
    tuple[Annotated[AnyTransform, Field(discriminator="kind")], ...], Field(min_length=1, max_length=MAX_TRANSFORMS)
]


class TransformsOfPixels(SpecModel):
    """The transforms of pixels of a stream by themselves, for commands that read nothing else of it."""

    transforms: Transforms | None = None
    """As in the stream."""
