"""What is done to the pixels of an image before they are cut into patches, each epoch anew.

Patch grids come from the sizes in the index, so every transform leaves an image the grid of the whole. What they do is
in `dataserver/images/transforms.py`.
"""

from fractions import Fraction
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from dataserver.planning.job.fields.values import DecimalString, SpecModel

MAX_TRANSFORMS: Final = 8
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


AnyTransform = HorizontalFlip | RandomResizedCrop
Transforms = Annotated[
    tuple[Annotated[AnyTransform, Field(discriminator="kind")], ...], Field(min_length=1, max_length=MAX_TRANSFORMS)
]
