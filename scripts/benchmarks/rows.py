"""Rows of a benchmark, and the table with its verdicts."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.calibration import REFERENCE, slowdown


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table that a benchmark prints."""

    name: str
    """What is measured, with its inputs."""
    measured: str
    """Median and worst over the seeds, with units."""
    target: str
    """What is to be reached; empty if nothing is."""
    reached: bool | None
    """Whether the target was reached; None where the row is printed for comparison."""
    explained: str = ""
    """Where the target is missed, what makes the difference, as it was found; empty if nothing is known."""


def spread(values: Sequence[float], form: str) -> str:
    """The median of some values, where less is better, and the largest, each in a format of Python's."""
    return f"{format(statistics.median(values), form)} (worst {format(max(values), form)})"


def show(rows: Iterable[Row], title: str | None = None) -> None:
    """Print a table with the verdict on each row."""
    shown = Table("what", "measured (median, worst)", "target", "", title=title)
    for row in rows:
        verdict = {True: "reached", False: "[red]missed[/red]", None: ""}[row.reached]
        if row.reached is False and row.explained:
            verdict = f"differs: {row.explained}"
        shown.add_row(row.name, row.measured, row.target, verdict)
    Console(width=180).print(shown)


def report(rows: Iterable[Row]) -> int:
    """Print the table and what was missed. Returns the exit code: 1 if a row missed its target unexplained."""
    made = list(rows)
    print(
        f"Times are those of {REFERENCE}; this core is now {slowdown():.2f} times slower, and they are scaled by that."
    )
    show(made)
    missed = [row.name for row in made if row.reached is False and not row.explained]
    differ = any(row.reached is False and row.explained for row in made)
    reached = "all rows with a target reached it" + (", or name the assumption by which they differ" if differ else "")
    print(f"{len(missed)} rows missed: {missed}" if missed else reached)
    return 1 if missed else 0
