"""Where a step was lost: by process, and the operations that took longest against the plan."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.table import Table

from dataserver.planning.simulation import OperationKind
from trainclient.timeline.lanes import Lane, MicrobatchSamples

SHOWN_OPERATIONS = 10
SHOWN_SAMPLES = 4
WIDTH = 180
SPENT = ("waited for data", "waited for peers", "transfers", "handed on", "gathers and sums", "done before")


@dataclass(frozen=True, slots=True)
class Loss:
    """What one process did with a step, nanoseconds; all but the first two make up the step as measured."""

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
    """From its last operation to the end of the step."""

    @property
    def spent(self) -> tuple[int, ...]:
        """What makes up the step as measured: computed, then as in `SPENT`."""
        waits = self.data_ns, self.waited_ns, self.moved_ns
        return self.computed_ns, *waits, self.sent_ns, self.shared_ns, self.idle_ns


def losses(lanes: Sequence[Lane]) -> list[Loss]:
    """One for each process, in their order."""
    end = max((int(lane.measured.done_ns[-1]) for lane in lanes if len(lane.operations)), default=0)
    found = []
    for lane in lanes:
        own, done = lane.measured, int(lane.measured.done_ns[-1]) if len(lane.operations) else 0
        parts = {
            "computed_ns": int(own.computed_ns[lane.computes].sum()),
            "data_ns": int(own.data_ns.sum()),
            "moved_ns": int(own.moved_ns.sum()),
            "sent_ns": int(own.sent_ns.sum() + own.lasted_ns[lane.mine(OperationKind.EXCHANGE)].sum()),
            "shared_ns": int(own.lasted_ns[lane.mine(OperationKind.UNSHARD, OperationKind.REDUCE)].sum()),
        }
        # What is left of its time, so that the parts make up the step.
        waited = done - sum(parts.values())
        planned = int((lane.planned_end_ns - lane.planned_start_ns).sum())
        found.append(Loss(lane.name, planned, waited_ns=waited, idle_ns=end - done, **parts))
    return found


def write_report(step: int, lanes: Sequence[Lane], samples: MicrobatchSamples, file: TextIO) -> None:
    """Write both tables as text."""
    planned = max((int(lane.planned_end_ns[-1]) for lane in lanes if len(lane.operations)), default=0)
    rows = losses(lanes)
    measured = max((sum(row.spent) for row in rows), default=0)
    console = Console(file=file, width=WIDTH)
    console.print(f"Step {step}: planned {planned / 1e6:,.1f} ms, measured {measured / 1e6:,.1f} ms.")
    console.print(_by_process(rows, planned, measured))
    console.print(_slowest(lanes, samples))


def _by_process(rows: Sequence[Loss], planned: int, measured: int) -> Table:
    table = Table(title="Where the step was spent: ms, and % of the step as measured", title_justify="left")
    table.add_column("process")
    for name in ("planned to compute", "computed", *SPENT):
        table.add_column(name, justify="right")
    for row in rows:
        shown = (f"{ns / 1e6:,.1f} ({_share(ns, measured)})" for ns in row.spent)
        table.add_row(row.name, f"{row.planned_ns / 1e6:,.1f} ({_share(row.planned_ns, planned)})", *shown)
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _slowest(lanes: Sequence[Lane], samples: MicrobatchSamples) -> Table:
    table = Table(title="Operations that computed longest against the plan", title_justify="left")
    for name in ("operation", "planned ms", "measured ms", "samples"):
        table.add_column(name, justify="right" if name.endswith("ms") else "left")
    every = [(int(lane.excess_ns[i]), lane, i) for lane in lanes for i, o in enumerate(lane.operations) if o.computes]
    for excess, lane, i in sorted(every, key=lambda entry: -entry[0])[:SHOWN_OPERATIONS]:
        operation, planned = lane.operations[i], int(lane.planned_end_ns[i] - lane.planned_start_ns[i])
        module = lane.modules[operation.chunk]
        held = samples.of(module, lane.rank, operation.microbatch)
        what = f"microbatch {operation.microbatch}" + (f" of {module}" if len(set(lane.modules)) > 1 else "")
        name = f"{lane.name}: {operation.kind} of {what}"
        table.add_row(name, f"{planned / 1e6:,.2f}", f"{(planned + excess) / 1e6:,.2f}", ", ".join(_samples(held)))
    return table


def _samples(held: Sequence[str]) -> Iterator[str]:
    yield from held[:SHOWN_SAMPLES]
    if len(held) > SHOWN_SAMPLES:
        yield f"and {len(held) - SHOWN_SAMPLES} more"
