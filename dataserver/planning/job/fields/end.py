"""When a job ends."""

from enum import StrEnum
from typing import Self

from pydantic import model_validator

from dataserver.planning.job.fields.values import Positive, SpecModel


class LastStep(StrEnum):
    """What becomes of a last step that has fewer samples than the others."""

    PAD = "pad"
    """It is served, with empty slots."""
    DROP = "drop"
    """It is left out."""


class End(SpecModel):
    """When the job ends: exactly one of `steps` and `passes`."""

    steps: Positive | None = None
    """Number of steps."""
    passes: Positive | None = None
    """Passes that every dataset completes; in a mixture the smaller ones begin further passes meanwhile."""
    last: LastStep = LastStep.PAD
    """The last short step of a job that ends with `passes`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.steps is None) == (self.passes is None):
            raise ValueError("exactly one of end.steps and end.passes is required")
        return self
