"""A clock on which operations take their planned time, however long they really take.

Messages carry the time at which they were sent, so the processes agree on a common time without looking at any clock.
A transfer begins when it was sent and its receive is posted. What the trainer executes then has the times that the
simulator gave it, to the nanosecond, unless one of them is wrong, or a receive is posted too late.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dataserver.planning import I64
from dataserver.planning.layouts.interface import PlannedTimeline
from dataserver.planning.simulation import Operation, OperationKind
from trainclient.exchange.communicators import (
    P2P,
    Collective,
    CollectiveWork,
    Communicators,
    EdgeP2P,
    Message,
    ReceiveWork,
    SendWork,
)
from trainclient.exchange.view_groups import ViewGroup
from trainclient.program.clock import Executed
from trainclient.topology.process_grid import GridProcess, Topology

TIME_BYTES = 8


class PlannedTimes:
    """What the simulator was told that operations and transfers take."""

    def __init__(self, planned: PlannedTimeline, topology: Topology, phase_ns: Mapping[str, I64] | None = None) -> None:
        """Find the nodes of a planned step among the processes of a topology.

        Args:
            planned: the step.
            topology: of its job.
            phase_ns: where modules are colocated, what rows take between each encoder or generator and the backbone,
                int64 [rounds].
        """
        self._phase_ns = phase_ns or {}
        found = {(node.modules, node.rank, node.stage): i for i, node in enumerate(planned.nodes)}
        self.node = tuple(
            found[tuple(chunk.module.name for chunk in process.chunks), process.rank, process.stage]
            for process in topology.processes
        )
        """The node of each global rank."""
        self.lockstep_ranks = topology.lockstep_ranks
        """Global ranks that begin each operation together."""
        pipeline = planned.pipeline
        self._chunks = pipeline.num_chunks
        self._num_microbatches = pipeline.forward_ns.shape[1]
        self._ns = {
            OperationKind.FORWARD: pipeline.forward_ns,
            OperationKind.BACKWARD: pipeline.backward_ns,
        }
        if pipeline.interaction_ns is not None:
            self._ns[OperationKind.INTERACTION] = pipeline.interaction_ns
        nodes = pipeline.edges[:, 1:] // pipeline.num_chunks
        delays = [0] * len(nodes) if pipeline.transfer_ns is None else pipeline.transfer_ns.tolist()
        keys = zip(pipeline.edges[:, 0].tolist(), *nodes.T.tolist(), strict=True)
        self._transfer_ns = dict(zip(keys, delays, strict=True))

    def operation_ns(self, rank: int, operation: Operation) -> int:
        """What an operation takes on a global rank; collectives take no time of their own."""
        if not operation.computes:
            return 0
        return int(self._ns[operation.kind][self.node[rank] * self._chunks + operation.chunk, operation.microbatch])

    def transfer_ns(self, source: int, target: int, microbatch: int) -> int:
        """What rows, or their gradients, take between two global ranks; the first one sends forward."""
        return int(self._transfer_ns[microbatch, self.node[source], self.node[target]])

    def phase_ns(self, modules: tuple[str, str], microbatch: int) -> int:
        """What all rows of a phase, or their gradients, take between two modules in the round of a microbatch."""
        of_rounds = [self._phase_ns[module] for module in modules if module in self._phase_ns]
        return sum(int(ns[microbatch * len(ns) // self._num_microbatches]) for ns in of_rounds)


class VirtualClock:
    """The time of one process."""

    def __init__(self, times: PlannedTimes, rank: int, process: GridProcess) -> None:
        self.now_ns = 0
        self.executed: list[Executed] = []
        """All operations of the step, in the order in which they were run."""
        self._times = times
        self._rank = rank
        self._modules = [chunk.module.name for chunk in process.chunks]
        self._phase: str | None = None
        self._collective: Collective | None = None
        self._sequence_group: ViewGroup | None = None

    def begin_step(self) -> None:
        """See `Clock`."""
        self.now_ns = 0
        self.executed.clear()
        self._phase = None

    def _enter_phase(self, module: str) -> None:
        """Where the operations of another module of the process begin, go on when all ranks have come so far."""
        if self._phase not in (None, module):
            self._barrier()
        self._phase = module

    def _barrier(self) -> None:
        """Go on when all ranks are done."""
        if self._collective is None:
            raise RuntimeError("the clock was given no communicators, and cannot wait for other ranks")
        own = [self.now_bytes(self._collective.device)] * self._collective.size
        for sent_at in self._collective.all_to_all(("", ""), own, [TIME_BYTES] * len(own)).wait():
            self.wait_until(sent_at)

    def _follow(self) -> None:
        """Go on when the first of those that share all sequences does, which exchanges rows with other modules."""
        if self._sequence_group is not None:
            now = self.now_bytes(torch.device("cpu"))
            self._sequence_group.broadcast(now)
            self.wait_until(now)

    @contextmanager
    def running(self, operation: Operation) -> Iterator[None]:
        """See `Clock`; ranks that are in step wait for the slowest of them before and behind what they compute, those
        that share all sequences for the first one."""
        self._enter_phase(self._modules[operation.chunk])
        in_step = self._rank in self._times.lockstep_ranks
        if in_step:
            self._barrier()
        if operation.computes:
            self._follow()
        start = self.now_ns
        yield
        self.now_ns = start + self._times.operation_ns(self._rank, operation)
        self.executed.append(Executed(operation, start, self.now_ns))
        if in_step:
            self._barrier()

    def communicators(self, communicators: Communicators) -> Communicators:
        """The same communicators, whose messages take the planned time."""
        rank, transfer_ns = self._rank, self._times.transfer_ns
        collective = self._collective = communicators.collective
        self._sequence_group = None if communicators.shared is None else communicators.shared.always
        edges = {
            edge: EdgeP2P(
                forward=TimedP2P(both.forward, self, lambda other, k: transfer_ns(other, rank, k)),
                backward=TimedP2P(both.backward, self, lambda other, k: transfer_ns(rank, other, k)),
            )
            for edge, both in communicators.edges.items()
        }
        timed = collective and TimedCollective(collective, self, self._times.phase_ns)
        return replace(communicators, edges=edges, collective=timed)

    def now_bytes(self, device: torch.device) -> Tensor:
        """The time as uint8 [TIME_BYTES]."""
        return torch.tensor([self.now_ns]).view(torch.uint8).to(device)

    def wait_until(self, sent_at: Tensor) -> None:
        """Go on at a time, unless it is over."""
        self.now_ns = max(self.now_ns, int(sent_at.cpu().clone().view(torch.int64)))


class TimedCollective:
    """A collective whose messages end with the time at which they leave."""

    def __init__(
        self, collective: Collective, clock: VirtualClock, phase_ns: Callable[[tuple[str, str], int], int]
    ) -> None:
        """Cross through a collective; `phase_ns` is what that takes between two modules, once all ranks take part."""
        self.rank = collective.rank
        self.size = collective.size
        self.device = collective.device
        self._collective = collective
        self._clock = clock
        self._phase_ns = phase_ns

    def all_to_all(
        self, modules: tuple[str, str], messages: Sequence[Tensor], num_bytes: Sequence[int], microbatch: int = 0
    ) -> CollectiveWork:
        """See `Collective`."""
        timed = [torch.cat([message, self._clock.now_bytes(self.device)]) for message in messages]
        work = self._collective.all_to_all(modules, timed, [n + TIME_BYTES for n in num_bytes], microbatch)
        return _TimedCollectiveWork(work, self._clock, self._phase_ns(modules, microbatch))


class _TimedCollectiveWork:
    def __init__(self, work: CollectiveWork, clock: VirtualClock, phase_ns: int) -> None:
        self._work, self._clock, self._phase_ns = work, clock, phase_ns

    def wait(self) -> list[Tensor]:
        """See `CollectiveWork`."""
        found = self._work.wait()
        for message in found:
            self._clock.wait_until(message[-TIME_BYTES:])
        self._clock.now_ns += self._phase_ns
        return [message[:-TIME_BYTES] for message in found]


class TimedP2P:
    """Point-to-point messages whose headers end with the time at which they were sent, int64."""

    def __init__(self, p2p: P2P, clock: VirtualClock, transfer_ns: Callable[[int, int], int]) -> None:
        """Send over `p2p`; `transfer_ns` is what a message to or from a rank takes in a microbatch."""
        self.rank = p2p.rank
        self._p2p = p2p
        self._clock = clock
        self._transfer_ns = transfer_ns

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """See `P2P`."""
        return self._p2p.empty(num_rows, width, dtype)

    def send(self, messages: Sequence[Message], microbatch: int) -> SendWork:
        """See `P2P`."""
        now = torch.tensor([self._clock.now_ns]).view(torch.uint8)
        timed = [replace(m, header=torch.cat([m.header, now])) for m in messages]
        return self._p2p.send(timed, microbatch)

    def post(self, messages: Sequence[Message], microbatch: int) -> ReceiveWork:
        """See `P2P`."""
        timed = [replace(m, header=m.header.new_empty(len(m.header) + TIME_BYTES)) for m in messages]
        takes = [self._transfer_ns(m.rank, microbatch) for m in messages]
        return _TimedReceiveWork(
            self._p2p.post(timed, microbatch), self._clock, self._clock.now_ns, messages, timed, takes
        )


@dataclass(frozen=True, slots=True, eq=False)
class _TimedReceiveWork:
    receive_work: ReceiveWork
    clock: VirtualClock
    posted_ns: int
    messages: Sequence[Message]
    timed: Sequence[Message]
    takes_ns: Sequence[int]

    def wait_headers(self) -> None:
        self.receive_work.wait_headers()
        for message, timed in zip(self.messages, self.timed, strict=True):
            message.header.copy_(timed.header[:-TIME_BYTES])

    def wait_rows(self) -> None:
        self.receive_work.wait_rows()
        for timed, takes_ns in zip(self.timed, self.takes_ns, strict=True):
            sent_ns = int(timed.header[-TIME_BYTES:].clone().view(torch.int64))
            self.clock.now_ns = max(self.clock.now_ns, max(sent_ns, self.posted_ns) + takes_ns)
