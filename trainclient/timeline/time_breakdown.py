"""Where a step was lost: by process, and the operations that took longest against the plan."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.table import Table

from dataserver.planning.simulation import OperationKind
from trainclient.timeline.tracks import MicrobatchSamples, Track

SHOWN_OPERATIONS = 10
SHOWN_SAMPLES = 4
WIDTH = 180
SPENT = ("waited for data", "waited for ranks", "transfers", "sent rows", "gathers and sums", "done before")


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """What one process did with a step, nanoseconds; all but the first two make up the step as recorded."""

    name: str
    planned_ns: int
    """What it was to compute."""
    computed_ns: int
    data_ns: int
    """Waited for microbatches from the servers."""
    waited_ns: int
    """Waited for other processes to send rows, or to take part in an operation."""
    moved_ns: int
    """Waited for rows that had been sent."""
    sent_ns: int
    """Handed rows on, also by exchanges."""
    shared_ns: int
    """Gathered shares of parameters and summed gradients, with the wait for ranks that come later."""
    idle_ns: int
    """Time from its last operation to the end of the step."""

    @property
    def spent(self) -> tuple[int, ...]:
        """What makes up the step as recorded: computed, then as in `SPENT`."""
        waits = self.data_ns, self.waited_ns, self.moved_ns
        return self.computed_ns, *waits, self.sent_ns, self.shared_ns, self.idle_ns


def time_breakdowns(tracks: Sequence[Track]) -> list[TimeBreakdown]:
    """One for each process, in their order."""
    end = max((int(track.recorded.done_ns[-1]) for track in tracks if len(track.operations)), default=0)
    found = []
    for track in tracks:
        own, done = track.recorded, int(track.recorded.done_ns[-1]) if len(track.operations) else 0
        parts = {
            "computed_ns": int(own.computed_ns[track.computes].sum()),
            "data_ns": int(own.data_ns.sum()),
            "moved_ns": int(own.moved_ns.sum()),
            "sent_ns": int(own.sent_ns.sum() + own.lasted_ns[track.mine(OperationKind.EXCHANGE)].sum()),
            "shared_ns": int(own.lasted_ns[track.mine(OperationKind.UNSHARD, OperationKind.REDUCE)].sum()),
        }
        # What is left of its time, so that the parts make up the step.
        waited = done - sum(parts.values())
        planned = int((track.planned_end_ns - track.planned_start_ns).sum())
        found.append(TimeBreakdown(track.name, planned, waited_ns=waited, idle_ns=end - done, **parts))
    return found


def write_report(step: int, tracks: Sequence[Track], samples: MicrobatchSamples, file: TextIO) -> None:
    """Write both tables as text."""
    planned = max((int(track.planned_end_ns[-1]) for track in tracks if len(track.operations)), default=0)
    rows = time_breakdowns(tracks)
    recorded = max((sum(row.spent) for row in rows), default=0)
    console = Console(file=file, width=WIDTH)
    console.print(f"Step {step}: planned {planned / 1e6:,.1f} ms, measured {recorded / 1e6:,.1f} ms.")
    console.print(_by_process(rows, planned, recorded))
    console.print(_slowest(tracks, samples))


def _by_process(rows: Sequence[TimeBreakdown], planned: int, recorded: int) -> Table:
    table = Table(title="Where the step was spent: ms, and % of the step as measured", title_justify="left")
    table.add_column("process")
    for name in ("planned to compute", "computed", *SPENT):
        table.add_column(name, justify="right")
    for row in rows:
        shown = (f"{ns / 1e6:,.1f} ({_share(ns, recorded)})" for ns in row.spent)
        table.add_row(row.name, f"{row.planned_ns / 1e6:,.1f} ({_share(row.planned_ns, planned)})", *shown)
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _slowest(tracks: Sequence[Track], samples: MicrobatchSamples) -> Table:
    table = Table(title="Operations that computed longest against the plan", title_justify="left")
    for name in ("operation", "planned ms", "measured ms", "samples"):
        table.add_column(name, justify="right" if name.endswith("ms") else "left")
    every = [
        (int(track.excess_ns[i]), track, i) for track in tracks for i, o in enumerate(track.operations) if o.computes
    ]
    for excess, track, i in sorted(every, key=lambda entry: -entry[0])[:SHOWN_OPERATIONS]:
        operation, planned = track.operations[i], int(track.planned_end_ns[i] - track.planned_start_ns[i])
        module = track.modules[operation.chunk]
        held = samples.of(module, track.rank, operation.microbatch)
        what = f"microbatch {operation.microbatch}" + (f" of {module}" if len(set(track.modules)) > 1 else "")
        name = f"{track.name}: {operation.kind} of {what}"
        table.add_row(name, f"{planned / 1e6:,.2f}", f"{(planned + excess) / 1e6:,.2f}", ", ".join(_samples(held)))
    return table


def _samples(held: Sequence[str]) -> Iterator[str]:
    yield from held[:SHOWN_SAMPLES]
    if len(held) > SHOWN_SAMPLES:
        yield f"and {len(held) - SHOWN_SAMPLES} more"
