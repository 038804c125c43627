"""All processes of a job as threads, on clocks of their own that only messages set."""

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue

import torch
from program.runtime_cases import Case
from program.virtual_clock import PlannedTimes, VirtualClock
from sleeping_modules import WIDTH, Listed, sleeping_module
from torch import Tensor

from dataserver.planning import I64
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.interface import PlannedTimeline
from trainclient.client import Batch
from trainclient.exchange.communicators import Collective, Communicators, EdgeP2P, Message
from trainclient.exchange.leader_broadcast import LeaderCollective, leader_edges
from trainclient.exchange.view_groups import SharedSequences
from trainclient.modules import Site
from trainclient.program.assembly import assemble
from trainclient.program.clock import Executed
from trainclient.program.runner import LossWeights
from trainclient.topology.process_grid import Topology

DEADLINE_S = 60


Boxes = dict[tuple[str, bool, int, int], "Queue[Message]"]
"""Messages being sent, by edge, direction, sender and receiver."""
Together = dict[tuple[int, int], "Queue[Tensor]"]
"""Those of collectives, by sender and receiver."""


class Left:
    """Messages that need no waiting."""

    def wait(self) -> None:
        """They have left."""

    def is_completed(self) -> bool:
        return True


@dataclass
class Awaited:
    """Messages that come from other threads."""

    queues: list["Queue[Message]"]
    messages: Sequence[Message]

    def wait_headers(self) -> None:
        for queue, message in zip(self.queues, self.messages, strict=True):
            found = queue.get(timeout=DEADLINE_S)
            message.header.copy_(found.header)
            message.rows.copy_(found.rows)

    def wait_rows(self) -> None:
        """They came with their headers."""


@dataclass
class ThreadCollective:
    """All ranks as threads."""

    rank: int
    size: int
    boxes: Together
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def all_to_all(
        self, modules: tuple[str, str], messages: Sequence[Tensor], num_bytes: Sequence[int], microbatch: int = 0
    ) -> "Arriving":
        del modules, microbatch
        for rank, message in enumerate(messages):
            self.boxes[self.rank, rank].put(message)
        return Arriving(self, num_bytes)


@dataclass
class Arriving:
    """Messages from all threads; those of one may wait for others before them."""

    to: ThreadCollective
    num_bytes: Sequence[int]

    def __post_init__(self) -> None:
        ranks = range(self.to.size)
        self.found = [self.to.boxes[rank, self.to.rank].get(timeout=DEADLINE_S) for rank in ranks]

    def wait(self) -> list[Tensor]:
        assert [len(message) for message in self.found] == list(self.num_bytes)
        return self.found


@dataclass
class ThreadP2P:
    """Point-to-point messages between threads."""

    rank: int
    edge: str
    back: bool
    boxes: Boxes

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, width, dtype=dtype)

    def send(self, messages: Sequence[Message], microbatch: int) -> Left:
        assert microbatch >= 0
        for message in messages:
            self.boxes[self.edge, self.back, self.rank, message.rank].put(message)
        return Left()

    def post(self, messages: Sequence[Message], microbatch: int) -> Awaited:
        assert microbatch >= 0
        return Awaited([self.boxes[self.edge, self.back, m.rank, self.rank] for m in messages], messages)


@dataclass
class ThreadViewGroup:
    """Peers that are threads."""

    rank: int
    row: tuple[int, ...]
    """Global ranks of all of them."""
    boxes: Together
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def leader(self) -> int:
        return self.row[0]

    @property
    def is_leader(self) -> bool:
        return self.rank == self.leader

    @property
    def size(self) -> int:
        return len(self.row)

    @property
    def position(self) -> int:
        return self.row.index(self.rank)

    def exchange(self, values: Tensor, leaving: Sequence[int], arriving: Sequence[int]) -> Tensor:
        raise NotImplementedError("modules that sleep exchange nothing")

    def broadcast(self, message: Tensor) -> None:
        if self.is_leader:
            for rank in self.row[1:]:
                self.boxes[self.rank, rank].put(message.clone())
        else:
            message.copy_(self.boxes[self.leader, self.rank].get(timeout=DEADLINE_S))


def collective_of(ranks: Sequence[int], group: ThreadViewGroup, boxes: Together) -> Collective | None:
    """The collective of a process, or of the leader of its group."""
    if group.leader not in ranks:
        return None
    rank_and_size = ranks.index(group.leader), len(ranks)
    own = ThreadCollective(*rank_and_size, boxes) if group.is_leader else None
    return own if group.size == 1 else LeaderCollective(own, *rank_and_size, group)


def execute(
    case: Case, job: Job, planned: PlannedTimeline, phase_ns: Mapping[str, I64] | None = None
) -> list[list[Executed]]:
    """What every process of step 0 executes, in the order of the global ranks."""
    topology = Topology.of(job.spec)
    times, ranks = PlannedTimes(planned, topology, phase_ns), range(topology.world_size)
    edges = [str(edge) for edge in topology.edges]
    boxes: Boxes = {key: Queue() for key in itertools.product(edges, (False, True), ranks, ranks)}
    together: Together = {key: Queue() for key in itertools.product(ranks, ranks)}
    said: Together = {key: Queue() for key in itertools.product(ranks, ranks)}
    handed_on: Together = {key: Queue() for key in itertools.product(ranks, ranks)}
    rows = {rank: row for stage in topology.stages for row in stage for rank in row}

    def run(rank: int, streams: Sequence[Sequence[Batch]]) -> list[Executed]:
        process = topology.processes[rank]
        clock = VirtualClock(times, rank, process)
        ends = {edge: EdgeP2P(*(ThreadP2P(rank, edge, back, boxes) for back in (False, True))) for edge in edges}
        group = ThreadViewGroup(rank, rows[rank], handed_on)
        ends = leader_edges(ends, group)
        exchanging = topology.lockstep_ranks or next((r for r in topology.collectives if group.leader in r), ())
        met, headers = (collective_of(exchanging, group, through) for through in (together, said))
        groups = [group for group in topology.sequence_groups if rank in group.members]
        pool = {group.ranks: ThreadViewGroup(rank, group.members, handed_on) for group in groups}
        shared = SharedSequences(process.rank, pool) if pool or rank in topology.lockstep_ranks else None
        communicators = clock.communicators(Communicators(ends, met, shared, headers))
        sites = [Site(job.spec, chunk.module, WIDTH, chunk.number, chunk.count) for chunk in process.chunks]
        modules = [(site, sleeping_module(site, scale=0)) for site in sites]
        machine = assemble(job.spec, topology, process, modules, communicators, LossWeights(), clock)
        assert machine.interpreter.run([Listed(batches) for batches in streams]) is not None
        return clock.executed

    views = {(m.name, p.rank): list(case.batches(m.name, p.rank)) for p in topology.processes for m in p.modules}
    with ThreadPoolExecutor(topology.world_size) as threads:
        wanted = [[views[m.name, p.rank] for m in p.modules] for p in topology.processes]
        executed = list(threads.map(run, range(topology.world_size), wanted))
    assert all(queue.empty() for queue in [*boxes.values(), *together.values(), *said.values(), *handed_on.values()])
    return executed


def assert_as_simulated(job: Job, planned: PlannedTimeline, executed: list[list[Executed]]) -> None:
    """Every process ran the operations that were planned, when they were simulated, to the nanosecond."""
    nodes = {(n.modules[0], n.rank, n.stage): i for i, n in enumerate(planned.nodes)}
    for process, found in zip(Topology.of(job.spec).processes, executed, strict=True):
        node = nodes[process.modules[0].name, process.rank, process.stage]
        listed = planned.pipeline.operations[int(planned.pipeline.stage[node])]
        assert [e.operation for e in found] == list(listed)
        count = len(listed)
        assert [e.start_ns for e in found] == planned.timeline.start_ns[node, :count].tolist()
        assert [e.end_ns for e in found] == planned.timeline.end_ns[node, :count].tolist()
    assert max(e.end_ns for found in executed for e in found) == planned.makespan_ns > 0
