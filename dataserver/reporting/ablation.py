"""What each change on the way from the baseline to a job brings, for everything that shows it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from dataserver.planning.planner import AblationResult

TITLE: Final = "from the baseline to the plan, one change at a time"


@dataclass(frozen=True, slots=True)
class AblationRow:
    """One change with its simulated time; None where it could not be planned."""

    name: str
    """The baseline, or what is new."""
    step_ns: float | None
    of_the_one_before: float | None
    """Time over that of the last row before that could be planned; of the first 1."""
    of_the_first: float | None
    """Time over that of the baseline."""

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Name, milliseconds, and both ratios, for people."""
        time = "-" if self.step_ns is None else f"{self.step_ns / 1e6:.1f}"
        before, first = ("-" if r is None else f"{r:.3f}" for r in (self.of_the_one_before, self.of_the_first))
        return self.name, time, before, first


COLUMNS: Final = ("", "step ms", "of the one before", "of the first")


def mean_ablation(steps: Sequence[Sequence[AblationResult]]) -> list[AblationRow]:
    """Means over some steps of one job; a change that one of them could not be planned with has no time.

    Args:
        steps: `planner.ablation` of each, one step at least.
    """
    found = []
    for change in zip(*steps, strict=True):
        times = [c.makespan_ns for c in change if c.makespan_ns is not None]
        found.append((change[0].name, fmean(times) if len(times) == len(change) else None))
    return ablation_rows(found)


def ablation_rows(times: Iterable[tuple[str, float | None]]) -> list[AblationRow]:
    """Names and nanoseconds with their ratios."""
    found: list[AblationRow] = []
    first = before = None
    for number, (name, step_ns) in enumerate(times):
        if step_ns is None:
            found.append(AblationRow(name, None, None, None))
            continue
        first = step_ns if first is None else first
        before = step_ns if before is None else before
        title = f"+ {name}" if number else name
        found.append(AblationRow(title, step_ns, step_ns / max(before, 1), step_ns / max(first, 1)))
        before = step_ns
    return found
