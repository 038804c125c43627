"""The tracks of a step: a plan that a server explains, and what all processes recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from disttrain.v1.plan_pb2 import ModuleArrangement, StepPlan
from disttrain.v1.program_pb2 import OPERATION_KIND_FORWARD

from dataserver.planning import I64, Bool
from dataserver.planning.job.fields import Stream
from dataserver.planning.plan.naming import short_name
from dataserver.planning.simulation import Operation, OperationKind
from trainclient.timeline.recorded import Recorded
from trainclient.topology.process_grid import GridProcess, Topology

_KINDS: Final = dict(enumerate(OperationKind, OPERATION_KIND_FORWARD))


@dataclass(frozen=True, slots=True, eq=False)
class Track:
    """One process of a step: what it was planned to do and when, and when it did it."""

    name: str
    modules: tuple[str, ...]
    """Module of each chunk that the process holds."""
    rank: int
    """Data-parallel rank within the module."""
    operations: tuple[Operation, ...]
    planned_start_ns: I64
    planned_end_ns: I64
    recorded: Recorded

    @property
    def holds(self) -> str:
        """Names of the process's modules, in words."""
        return " + ".join(dict.fromkeys(self.modules))

    @property
    def computes(self) -> Bool:
        """Which operations compute, as plans give them time; bool [n]."""
        return np.array([operation.computes for operation in self.operations], np.bool_)

    def mine(self, *kinds: OperationKind) -> Bool:
        """Which operations are of these kinds; bool [n]."""
        return np.array([operation.kind in kinds for operation in self.operations], np.bool_)

    @property
    def excess_ns(self) -> I64:
        """How much longer each operation computed than planned; int64 [n]."""
        return self.recorded.computed_ns - (self.planned_end_ns - self.planned_start_ns)


class PlannedOperations:
    """What each process was planned to do, by a plan with its timelines."""

    def __init__(self, plan: StepPlan) -> None:
        """Look them up in a plan."""
        self._programs = {(tuple(p.modules), p.stage): p for p in plan.programs}
        self._times = {(tuple(t.modules), t.stage, t.rank): t for t in plan.timelines}

    def of(self, process: GridProcess) -> tuple[tuple[Operation, ...], I64, I64]:
        """Its operations, with begin and end of each, int64 [n] nanoseconds."""
        modules = tuple(chunk.module.name for chunk in process.chunks)
        program, times = self._programs[modules, process.stage], self._times[modules, process.stage, process.rank]
        operations = zip(program.kind, program.chunk, program.microbatch, strict=True)
        planned = tuple(Operation(_KINDS[kind], microbatch, chunk) for kind, chunk, microbatch in operations)
        return planned, np.array(times.start_ns, np.int64), np.array(times.end_ns, np.int64)


def tracks_of(plan: StepPlan, topology: Topology, recorded: Sequence[Recorded]) -> list[Track]:
    """A track for each process, by its global rank."""
    planned, tracks = PlannedOperations(plan), []
    for process, found in zip(topology.processes, recorded, strict=True):
        modules = tuple(chunk.module.name for chunk in process.chunks)
        tracks.append(Track(str(process), modules, process.rank, *planned.of(process), found))
    return tracks


class MicrobatchSamples:
    """Which samples a microbatch of a module's rank holds."""

    def __init__(self, plan: StepPlan, topology: Topology, stream: Stream) -> None:
        """Look them up in a plan."""
        self._plan = plan
        self._stream = stream
        self._holds_samples = {m.name: m.holds_samples for process in topology.processes for m in process.modules}
        self._image_sample = np.repeat(np.arange(len(plan.samples.images)), plan.samples.images)
        self._arrangements: dict[str, ModuleArrangement] = {a.module: a for a in plan.arrangements}

    def of(self, module: str, rank: int, microbatch: int) -> list[str]:
        """Their names, each once, in the order of the microbatch."""
        arrangement, samples = self._arrangements[module], self._plan.samples
        here = (np.array(arrangement.rank) == rank) & (np.array(arrangement.microbatch) == microbatch)
        items = np.array(arrangement.item, np.int64)[here]
        held = items if self._holds_samples[module] else self._image_sample[items]
        return [short_name(self._stream, samples.dataset[i], samples.sample[i]) for i in dict.fromkeys(held.tolist())]
