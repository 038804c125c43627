"""Where the time of one process goes, from its start to the end of the run: every moment counts once."""

import socket
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final

import numpy as np
import psutil

from dataserver.planning import I64
from dataserver.planning.simulation import OperationKind
from trainclient.program.assembly import Machine
from trainclient.program.clock import Stopwatch
from trainclient.program.interpreter import StepRecord
from trainclient.timeline.recorded import Recorded
from trainclient.topology.process_grid import GridProcess, Topology
from trainclient.training.metrics import Totals

MAX_HOST_CHARS: Final = 64


class Part(StrEnum):
    """What a process does with its time, besides waiting for rows of modules."""

    COMPUTED = "computed"
    DATA = "waited for data"
    TRANSFERS = "moved rows"
    """Sent its rows, and waited for rows that had been sent."""
    COLLECTIVES = "gathers, sums, exchanges"
    """Collectives of its program and within its passes, with the wait for ranks that come later."""
    STEP_END = "ended steps"
    """Time from its last operation until it knew the sums of all processes; on GPUs also the optimizer."""
    UPDATE = "updated parameters"
    """The optimizer, metrics and all else behind these sums."""
    CHECKPOINTS = "saved checkpoints"
    EVALUATION = "evaluated"
    START = "started, first step"
    """Time from the start of the process to the end of the first step, which compiles and warms up."""
    OTHER = "other"


BETWEEN_STEPS: Final = frozenset({Part.CHECKPOINTS, Part.EVALUATION, Part.OTHER})
"""What is no part of any step's seconds."""
_IN_COLLECTIVES: Final = (OperationKind.UNSHARD, OperationKind.REDUCE, OperationKind.EXCHANGE)


@dataclass(slots=True)
class ProcessTimes:
    """Where the time of one process went, in nanoseconds."""

    name: str
    holds: str
    """Names of the process's modules, in words."""
    stage: int
    host: str
    steps: int = 0
    """Steps after the first one, which all but `START` is of."""
    flops: float | None = 0.0
    """Operations of these steps by its views; None if a module does not count its own."""
    tokens: int = 0
    """Tokens of these steps in its views."""
    parts: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    """Waits for rows or gradients, by the modules that they come from, in words."""

    @property
    def total_ns(self) -> int:
        """Time from the start of the process to the end of the run."""
        return self.parts.total() + self.rows.total()

    def as_dict(self) -> dict[str, Any]:
        """The same as a dictionary, for JSON and for `of`."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "ProcessTimes":
        """Make times from what `as_dict` made of one, through JSON."""
        counters = {name: Counter(told[name]) for name in ("parts", "rows")}
        return cls(**{**told, **counters})


class RunTimes:
    """Counts where the time of this process goes. Each call says what the time since the last one was."""

    def __init__(self, topology: Topology, process: GridProcess) -> None:
        """Count from the start of the operating system's process."""
        self.topology = topology
        holds = " + ".join(m.name for m in process.modules)
        self.own = ProcessTimes(str(process), holds, process.stage, socket.gethostname()[:MAX_HOST_CHARS])
        self._sources = sources(topology, process)
        self.waits_s = array("d")
        """The longest wait for data of any process, in each step but the first."""
        self.step_s = 0.0
        """Seconds of these steps, of the slowest process."""
        self._has_stepped = False
        self._at_ns = self._lap_ns = time.perf_counter_ns()
        age_ns = round((time.time() - psutil.Process().create_time()) * 1e9)
        self.own.parts[Part.START] += max(age_ns, 0)

    def until_now(self, part: Part) -> None:
        """All since the last call was this; until the end of the first step most of it is a part of the start."""
        elapsed, self._at_ns = self._elapsed()
        is_told = self._has_stepped or part in (Part.CHECKPOINTS, Part.EVALUATION)
        self.own.parts[part if is_told else Part.START] += elapsed
        if part in BETWEEN_STEPS:
            self._lap_ns += elapsed

    def lap_s(self) -> float:
        """Seconds since the last call, without what is between steps."""
        now = time.perf_counter_ns()
        begun, self._lap_ns = self._lap_ns, now
        return (now - begun) / 1e9

    def step(self, record: StepRecord, clock: Stopwatch, machine: Machine, totals: Totals) -> None:
        """All since the last call was a step, up to its totals; on GPUs waits for its last operation.

        The first step counts as `START`, with all before it.
        """
        begun, (elapsed, self._at_ns) = self._at_ns, self._elapsed()
        if not self._has_stepped:
            self.own.parts[Part.START] += elapsed
            return
        before = self.own.total_ns
        self._split(record, Recorded.of(record.spans, clock.executed(), begun))
        self.own.parts[Part.STEP_END] += max(elapsed - (self.own.total_ns - before), 0)
        self.waits_s.append(totals.wait_ratio * totals.seconds)
        self.step_s += totals.seconds
        self.own.steps += 1
        for runner in machine.runners:
            self.own.tokens += runner.work.tokens
            known = self.own.flops is not None and runner.work.flops is not None
            self.own.flops = (self.own.flops or 0) + (runner.work.flops or 0) if known else None

    def end_step(self) -> None:
        """All since the last call updated parameters; the start is over."""
        self.until_now(Part.UPDATE)
        self._has_stepped = True

    def _elapsed(self) -> tuple[int, int]:
        now = time.perf_counter_ns()
        return now - self._at_ns, now

    def _split(self, record: StepRecord, found: Recorded) -> None:
        """Add the operations of a step: each is computed, or a collective, after waits that are told apart."""
        own, operations = self.own, [span.operation for span in record.spans]
        collective = np.array([operation.kind in _IN_COLLECTIVES for operation in operations], np.bool_)
        own.parts[Part.COMPUTED] += _sum(found.computed_ns[~collective])
        own.parts[Part.DATA] += _sum(found.data_ns)
        own.parts[Part.TRANSFERS] += _sum(found.moved_ns) + _sum(found.sent_ns)
        own.parts[Part.COLLECTIVES] += _sum(found.lasted_ns[collective]) + _sum(found.within_ns[~collective])
        for operation, waited_ns in zip(operations, found.waited_ns.tolist(), strict=True):
            source = self._sources.get((operation.kind, operation.chunk), "")
            if source:
                own.rows[source] += waited_ns
            else:
                own.parts[Part.COLLECTIVES if operation.kind is OperationKind.INTERACTION else Part.OTHER] += waited_ns


def sources(topology: Topology, process: GridProcess) -> dict[tuple[OperationKind, int], str]:
    """The modules whose rows a pass of a chunk waits for, in words, by its kind and the chunk's position."""
    found = {}
    for number, chunk in enumerate(process.chunks):
        into = dict.fromkeys(edge.source.module.name for edge in topology.into(chunk))
        back = dict.fromkeys(edge.target.module.name for edge in topology.out_of(chunk) if edge.returns)
        found[OperationKind.FORWARD, number] = " + ".join(into)
        found[OperationKind.BACKWARD, number] = " + ".join(back)
    return found


def _sum(values: I64) -> int:
    return int(values.sum())
