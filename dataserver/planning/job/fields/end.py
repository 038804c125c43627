"""When a job ends: after a number of epochs or of steps."""

from enum import StrEnum
from typing import Self

from pydantic import model_validator

from dataserver.planning.job.fields.values import Positive, SpecModel


class LastStep(StrEnum):
    """What becomes of a last step that has fewer samples than the others."""

    PAD = "pad"
    """It is served, with empty slots."""
    DROP = "drop"
    """The last step is left out."""


class End(SpecModel):
    """When the job ends: exactly one of `steps` and `epochs`."""

    steps: Positive | None = None
    """The job ends after this many steps."""
    epochs: Positive | None = None
    """Epochs that every dataset completes; in a mixture the smaller ones begin further epochs meanwhile."""
    last: LastStep = LastStep.PAD
    """The last short step of a job that ends with `epochs`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("exactly one of end.steps and end.epochs is required")
        return self
