"""A row of the planner's benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table that `scripts/bench_planning.py` prints."""

    name: str
    """What is measured, with its inputs."""
    measured: str
    """Median and worst over the seeds, with units."""
    target: str
    """What is to be reached; empty if nothing is."""
    reached: bool | None
    """None: printed for comparison."""
