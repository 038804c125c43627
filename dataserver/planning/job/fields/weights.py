"""The weight of a dataset: one for all steps, or pieces of steps with a weight each."""

from typing import Annotated, Any, Final

from pydantic import Discriminator, Field, Tag

from dataserver.planning.job.fields.values import DecimalString, Natural, SpecModel

MAX_PIECES: Final = 1024
"""Pieces of one dataset's weight."""
MAX_SHARES: Final = 1 << 16
"""Datasets x steps from which any weight changes: what servers compute when they create a job."""


class WeightPiece(SpecModel):
    """The weight of a dataset from a step on, up to the next piece."""

    from_step: Natural
    """First step with this weight."""
    weight: DecimalString
    """Like a weight that never changes; with 0 no samples of the dataset are read."""


def _kind(value: Any) -> str:
    return "pieces" if isinstance(value, list | tuple) else "constant"


Weight = Annotated[
    Annotated[DecimalString, Tag("constant")]
    | Annotated[tuple[WeightPiece, ...], Field(min_length=1, max_length=MAX_PIECES), Tag("pieces")],
    Discriminator(_kind),
]
