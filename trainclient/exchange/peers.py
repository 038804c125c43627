"""Peers: one process among the others for all of them, and what it hands on.

The first of tensor-parallel peers reads the stream of views, and exchanges rows with the peers of other ranks; of both
the others get the same. Of rows that leave, and of gradients that go back, all peers have the same, so that the first
one's are sent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainclient.exchange.all_to_all import begin_exchange
from trainclient.exchange.grouped import Peers
from trainclient.exchange.transport import (
    Arrival,
    Channel,
    Collective,
    Departure,
    Directions,
    Message,
    Receipt,
    contact,
)
from trainclient.exchange.waiting import Waits


@dataclass(frozen=True, slots=True, eq=False)
class GroupPeers:
    """Peers that are process groups."""

    leader: int
    device: torch.device
    """Of the computation."""
    group: ProcessGroup
    """Of the backend that moves tensors of the device."""
    control: ProcessGroup
    """The same over gloo, for data on the CPU."""
    waits: Waits
    """Of this process."""
    alike: bool = False
    """Whether they always have equal parts of the same microbatch: what they exchange in the middle of it takes as long
    as its rows take, and is no wait."""

    @property
    def leads(self) -> bool:
        """See `Peers`."""
        return self.group.rank() == 0

    @property
    def size(self) -> int:
        """See `Sharers`."""
        return self.group.size()

    @property
    def position(self) -> int:
        """See `Sharers`."""
        return self.group.rank()

    def begin(
        self, values: Tensor, leaving: Sequence[int], arriving: Sequence[int], *, midway: bool = False
    ) -> Callable[[], Tensor]:
        """See `Sharers`."""
        waits = Waits(self.device) if midway and self.alike else self.waits
        return begin_exchange(values, leaving, arriving, self.group, waits)

    def hand_on(self, message: Tensor) -> None:
        """See `Peers`."""
        with contact("peers"), self.waits.waiting():
            dist.broadcast(message, group_src=0, group=self.group if message.device == self.device else self.control)


class PeerChannel:
    """A channel that peers share."""

    def __init__(self, channel: Channel, peers: Peers) -> None:
        self.rank = peers.leader
        """The one that other processes know."""
        self._channel = channel
        self._peers = peers

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """See `Channel`."""
        return self._channel.empty(num_rows, width, dtype)

    def send(self, messages: Sequence[Message], microbatch: int) -> Departure:
        """See `Channel`."""
        return self._channel.send(messages, microbatch) if self._peers.leads else _Sent()

    def post(self, messages: Sequence[Message], microbatch: int) -> Receipt:
        """See `Channel`."""
        return _Handed(self._channel.post(messages, microbatch) if self._peers.leads else None, messages, self._peers)


class PeerCollective:
    """A collective of first peers, each of which hands on what it gets; to the others, all its peers are one rank."""

    def __init__(self, collective: Collective | None, rank: int, size: int, peers: GroupPeers) -> None:
        """Share a collective.

        Args:
            collective: of the first peers; None on the others.
            rank: of the first peer in it.
            size: of it.
            peers: of this process.
        """
        self.rank, self.size, self.device = rank, size, peers.device
        self._collective = collective
        self._peers = peers

    def all_to_all(
        self, way: tuple[str, str], messages: Sequence[Tensor], num_bytes: Sequence[int], microbatch: int = 0
    ) -> Arrival:
        """See `Collective`; the messages of the first peer count."""
        own = self._collective
        arrival = None if own is None else own.all_to_all(way, messages, num_bytes, microbatch)
        return _HandedAll(arrival, num_bytes, self._peers)


def shared_ways(ways: Mapping[str, Directions], peers: Peers) -> dict[str, Directions]:
    """The same channels for all peers, of which the first one uses them."""
    return {
        name: Directions(PeerChannel(both.forward, peers), PeerChannel(both.backward, peers))
        for name, both in ways.items()
    }


class _Sent:
    """What the first peer sends, as the others see it."""

    def wait(self) -> None:
        """See `Departure`."""

    def has_left(self) -> bool:
        """See `Departure`."""
        return True


@dataclass(frozen=True, slots=True, eq=False)
class _Handed:
    """What the first peer receives; the others get it when they wait for it."""

    receipt: Receipt | None
    messages: Sequence[Message]
    peers: Peers

    def wait_stamps(self) -> None:
        """See `Receipt`."""
        if self.receipt is not None:
            self.receipt.wait_stamps()
        for message in self.messages:
            self.peers.hand_on(message.stamp)

    def wait_rows(self) -> None:
        """See `Receipt`."""
        if self.receipt is not None:
            self.receipt.wait_rows()
        for message in self.messages:
            if message.rows.is_cuda:  # its memory may belong to another stream
                message.rows.record_stream(torch.cuda.current_stream(message.rows.device))
            self.peers.hand_on(message.rows)


@dataclass(frozen=True, slots=True, eq=False)
class _HandedAll:
    """What the first peer receives of all ranks, as all peers get it."""

    arrival: Arrival | None
    num_bytes: Sequence[int]
    peers: GroupPeers

    def wait(self) -> list[Tensor]:
        """See `Arrival`."""
        if self.arrival is None:
            whole = torch.empty(sum(self.num_bytes), dtype=torch.uint8, device=self.peers.device)
        else:
            whole = torch.cat(self.arrival.wait())
        self.peers.hand_on(whole)
        return list(torch.split(whole, list(self.num_bytes)))
