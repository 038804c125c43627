"""What a run says at its end: a table of where its time went, and the largest remedies."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from dataserver.planning.plan.naming import counted
from trainclient.report import aligned
from trainclient.run_times.remedies import LEAST_SHARE, LEAST_STEPS, Remedy, RunFacts, remedies
from trainclient.run_times.spent import Part, ProcessTimes

LEAST_SHOWN: Final = 0.0005
"""Share of the time below which a row of the table is left out."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Where the time of the mean of some processes went, in seconds."""

    parts: dict[Part, float]
    rows: dict[str, float]
    """Waits for rows, by the modules that they come from."""

    @classmethod
    def of(cls, processes: Sequence[ProcessTimes]) -> "Spent":
        """The mean over these processes."""
        number = len(processes) * 1e9
        sources = dict.fromkeys(source for p in processes for source in p.rows)
        return cls(
            {part: sum(p.parts[part] for p in processes) / number for part in Part},
            {source: sum(p.rows[source] for p in processes) / number for source in sources},
        )

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self.parts.values()) + sum(self.rows.values())

    def as_dict(self) -> dict[str, Any]:
        """The same as a dictionary, for JSON."""
        return {f"{part.name.lower()}_s": seconds for part, seconds in self.parts.items()} | {"rows_s": self.rows}


@dataclass(frozen=True, slots=True)
class RunReport:
    """Where the time of a run went, and what would save some of it."""

    first: int
    """First step of the run."""
    end: int
    """The step after its last one."""
    num_processes: int
    all: Spent
    modules: dict[str, Spent]
    """Times by what processes hold, in words."""
    remedies: list[Remedy]

    @classmethod
    def of(cls, run: RunFacts) -> "RunReport":
        """Make the report of what all processes counted."""
        holders = dict.fromkeys(p.holds for p in run.processes)
        by_holder = {holds: Spent.of([p for p in run.processes if p.holds == holds]) for holds in holders}
        return cls(run.first, run.end, len(run.processes), Spent.of(run.processes), by_holder, remedies(run))

    def as_dict(self) -> dict[str, Any]:
        """The same as a dictionary, for JSON."""
        return {
            "first_step": self.first,
            "steps": self.end - self.first,
            "processes": self.num_processes,
            "seconds": self.all.total,
            "all": self.all.as_dict(),
            "modules": {holds: spent.as_dict() for holds, spent in self.modules.items()},
            "remedies": [asdict(remedy) for remedy in self.remedies],
        }

    def text(self) -> str:
        """The table and the remedies, in lines."""
        title = (
            f"Where the time of {counted(self.end - self.first, 'step')} went: {self.all.total:,.1f} s of "
            f"{'one process' if self.num_processes == 1 else f'each of {self.num_processes:,} processes'}"
        )
        columns = [self.all, *(self.modules.values() if len(self.modules) > 1 else ())]
        names = ["all", *(self.modules if len(self.modules) > 1 else ())]
        rows = [("", "seconds", *names), *_rows(columns)]
        return "\n".join([title, *aligned(rows, right=True), *self._said()]) + "\n"

    def _said(self) -> Iterator[str]:
        if self.end - self.first <= LEAST_STEPS:
            yield f"Remedies need more than {LEAST_STEPS} steps."
        elif not self.remedies:
            yield f"Nothing to mend: no known remedy would save {LEAST_SHARE:.0%} of the time after the start."
        else:
            yield "Largest remedies, with what they save of the time after the start at most:"
        for number, remedy in enumerate(self.remedies, 1):
            yield f"{number}. {remedy.saves:.0%}: {remedy.text}."
            yield f"   {remedy.command}"


def _rows(columns: Sequence[Spent]) -> Iterator[tuple[str, ...]]:
    whole = max(columns[0].total, 1e-9)
    parts = {part: [spent.parts[part] for spent in columns] for part in Part}
    rows = {source: [spent.rows.get(source, 0.0) for spent in columns] for source in columns[0].rows}
    named = {
        **{part.value: values for part, values in parts.items() if part in (Part.COMPUTED, Part.DATA)},
        **{f"waited for rows of {source}": values for source, values in rows.items()},
        **{part.value: values for part, values in parts.items() if part not in (Part.COMPUTED, Part.DATA)},
    }
    for name, values in named.items():
        if max(value / max(spent.total, 1e-9) for value, spent in zip(values, columns, strict=True)) >= LEAST_SHOWN:
            shares = (f"{value / max(spent.total, 1e-9):.1%}" for value, spent in zip(values, columns, strict=True))
            yield name, f"{values[0]:,.1f}", *shares
    yield "in all", f"{whole:,.1f}", *(f"{1:.1%}" for _ in columns)
