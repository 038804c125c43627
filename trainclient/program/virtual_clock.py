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
from trainclient.exchange.grouped import Peers
from trainclient.exchange.transport import (
    Arrival,
    Channel,
    Channels,
    Collective,
    Departure,
    Directions,
    Message,
    Receipt,
)
from trainclient.program.clock import Executed
from trainclient.topology.places import Topology

TIME_BYTES = 8


class PlannedTimes:
    """What the simulator was told that operations and transfers take."""

    def __init__(self, planned: PlannedTimeline, topology: Topology, hop_ns: Mapping[str, I64] | None = None) -> None:
        """Find the nodes of a planned step among the processes of a topology.

        Args:
            planned: the step.
            topology: of its job.
            hop_ns: where modules are colocated, what rows take between each encoder or generator and the backbone,
                int64 [rounds].
        """
        self._hop_ns = hop_ns or {}
        nodes = {(node.modules, node.rank, node.stage): i for i, node in enumerate(planned.nodes)}
        self.node = tuple(
            nodes[tuple(chunk.module.name for chunk in place.chunks), place.rank, place.stage]
            for place in topology.places
        )
        """The node of each global rank."""
        self.in_step = topology.in_step
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
        hops = pipeline.edges[:, 1:] // pipeline.num_chunks
        delays = [0] * len(hops) if pipeline.transfer_ns is None else pipeline.transfer_ns.tolist()
        keys = zip(pipeline.edges[:, 0].tolist(), *hops.T.tolist(), strict=True)
        self._transfer_ns = dict(zip(keys, delays, strict=True))

    def operation_ns(self, rank: int, operation: Operation) -> int:
        """What an operation takes on a global rank; collectives take no time of their own."""
        if not operation.computes:
            return 0
        return int(self._ns[operation.kind][self.node[rank] * self._chunks + operation.chunk, operation.microbatch])

    def transfer_ns(self, source: int, target: int, microbatch: int) -> int:
        """What rows, or their gradients, take between two global ranks of which the first sends forward."""
        return int(self._transfer_ns[microbatch, self.node[source], self.node[target]])

    def hop_ns(self, way: tuple[str, str], microbatch: int) -> int:
        """What all rows of a phase, or their gradients, take between two modules in the round of a microbatch."""
        of_rounds = [self._hop_ns[module] for module in way if module in self._hop_ns]
        return sum(int(ns[microbatch * len(ns) // self._num_microbatches]) for ns in of_rounds)


class VirtualClock:
    """The time of one process."""

    def __init__(self, times: PlannedTimes, rank: int) -> None:
        self.now_ns = 0
        self.executed: list[Executed] = []
        """All operations of the step, in the order in which they were run."""
        self._times = times
        self._rank = rank
        self._collective: Collective | None = None
        self._sharers: Peers | None = None

    def begin_step(self) -> None:
        """See `Clock`."""
        self.now_ns = 0
        self.executed.clear()

    def next_phase(self) -> None:
        """See `Clock`."""
        self._barrier()

    def _barrier(self) -> None:
        """Go on when all ranks are done."""
        if self._collective is None:
            raise RuntimeError("a clock without channels knows of no other ranks")
        own = [self.stamp(self._collective.device)] * self._collective.size
        for stamp in self._collective.all_to_all(("", ""), own, [TIME_BYTES] * len(own)).wait():
            self.meet(stamp)

    def _follow(self) -> None:
        """Go on when the first of those that share all sequences does, which exchanges rows with other modules."""
        if self._sharers is not None:
            now = self.stamp(torch.device("cpu"))
            self._sharers.hand_on(now)
            self.meet(now)

    @contextmanager
    def running(self, operation: Operation) -> Iterator[None]:
        """See `Clock`; ranks that are in step wait for the slowest of them before and behind what they compute, those
        that share all sequences for the first one."""
        in_step = self._rank in self._times.in_step
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

    def channels(self, channels: Channels) -> Channels:
        """The same channels, whose messages take the planned time."""
        rank, transfer_ns = self._rank, self._times.transfer_ns
        together = self._collective = channels.together
        self._sharers = None if channels.shared is None else channels.shared.always
        ways = {
            way: Directions(
                forward=TimedChannel(both.forward, self, lambda peer, k: transfer_ns(peer, rank, k)),
                backward=TimedChannel(both.backward, self, lambda peer, k: transfer_ns(rank, peer, k)),
            )
            for way, both in channels.ways.items()
        }
        timed = together and TimedCollective(together, self, self._times.hop_ns)
        return replace(channels, ways=ways, together=timed)

    def stamp(self, device: torch.device) -> Tensor:
        """The time as uint8 [TIME_BYTES]."""
        return torch.tensor([self.now_ns]).view(torch.uint8).to(device)

    def meet(self, stamp: Tensor) -> None:
        """Go on at the time of a stamp, if it is not over."""
        self.now_ns = max(self.now_ns, int(stamp.cpu().clone().view(torch.int64)))


class TimedCollective:
    """A collective whose messages end with the time at which they leave."""

    def __init__(
        self, collective: Collective, clock: VirtualClock, hop_ns: Callable[[tuple[str, str], int], int]
    ) -> None:
        """Cross through a collective; `hop_ns` is what that takes between two modules, once all ranks take part."""
        self.rank = collective.rank
        self.size = collective.size
        self.device = collective.device
        self._collective = collective
        self._clock = clock
        self._hop_ns = hop_ns

    def all_to_all(
        self, way: tuple[str, str], messages: Sequence[Tensor], num_bytes: Sequence[int], microbatch: int = 0
    ) -> Arrival:
        """See `Collective`."""
        timed = [torch.cat([message, self._clock.stamp(self.device)]) for message in messages]
        arrival = self._collective.all_to_all(way, timed, [n + TIME_BYTES for n in num_bytes], microbatch)
        return _TimedArrival(arrival, self._clock, self._hop_ns(way, microbatch))


class _TimedArrival:
    def __init__(self, arrival: Arrival, clock: VirtualClock, hop_ns: int) -> None:
        self._arrival, self._clock, self._hop_ns = arrival, clock, hop_ns

    def wait(self) -> list[Tensor]:
        """See `Arrival`."""
        found = self._arrival.wait()
        for message in found:
            self._clock.meet(message[-TIME_BYTES:])
        self._clock.now_ns += self._hop_ns
        return [message[:-TIME_BYTES] for message in found]


class TimedChannel:
    """A channel whose stamps end with the time at which they were sent, int64."""

    def __init__(self, channel: Channel, clock: VirtualClock, transfer_ns: Callable[[int, int], int]) -> None:
        """Use a channel; `transfer_ns` is what a message of a peer takes in a microbatch."""
        self.rank = channel.rank
        self._channel = channel
        self._clock = clock
        self._transfer_ns = transfer_ns

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """See `Channel`."""
        return self._channel.empty(num_rows, width, dtype)

    def send(self, messages: Sequence[Message], microbatch: int) -> Departure:
        """See `Channel`."""
        now = torch.tensor([self._clock.now_ns]).view(torch.uint8)
        timed = [replace(m, stamp=torch.cat([m.stamp, now])) for m in messages]
        return self._channel.send(timed, microbatch)

    def post(self, messages: Sequence[Message], microbatch: int) -> Receipt:
        """See `Channel`."""
        timed = [replace(m, stamp=m.stamp.new_empty(len(m.stamp) + TIME_BYTES)) for m in messages]
        takes = [self._transfer_ns(m.peer, microbatch) for m in messages]
        return _TimedReceipt(
            self._channel.post(timed, microbatch), self._clock, self._clock.now_ns, messages, timed, takes
        )


@dataclass(frozen=True, slots=True, eq=False)
class _TimedReceipt:
    receipt: Receipt
    clock: VirtualClock
    posted_ns: int
    messages: Sequence[Message]
    timed: Sequence[Message]
    takes_ns: Sequence[int]

    def wait_stamps(self) -> None:
        self.receipt.wait_stamps()
        for message, timed in zip(self.messages, self.timed, strict=True):
            message.stamp.copy_(timed.stamp[:-TIME_BYTES])

    def wait_rows(self) -> None:
        self.receipt.wait_rows()
        for timed, takes_ns in zip(self.timed, self.takes_ns, strict=True):
            sent_ns = int(timed.stamp[-TIME_BYTES:].clone().view(torch.int64))
            self.clock.now_ns = max(self.clock.now_ns, max(sent_ns, self.posted_ns) + takes_ns)
