"""Tensor-parallel ranks share the messages of their leader.

The leader of a tensor-parallel group reads the stream of views and exchanges rows with the leaders of other groups; it
broadcasts both to its group. All of a group have equal rows and gradients, so the leader's are sent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainclient.exchange.all_to_all import begin_exchange
from trainclient.exchange.communicators import P2P, Collective, CollectiveWork, EdgeP2P, Message, ReceiveWork, SendWork
from trainclient.exchange.lost_ranks import translate_rank_errors
from trainclient.exchange.view_groups import ViewGroup
from trainclient.exchange.wait_times import Waits


@dataclass(frozen=True, slots=True, eq=False)
class TorchViewGroup:
    """Ranks that work on the same views, as process groups."""

    leader: int
    device: torch.device
    """Device of the tensors that are broadcast."""
    group: ProcessGroup
    """The group over the backend of the device."""
    control: ProcessGroup
    """The group over gloo, for tensors on the CPU."""
    waits: Waits
    """The recorded waits of this process."""
    alike: bool = False
    """Whether all always have equal parts of the same microbatch. An exchange within it then counts as compute time,
    not as waiting."""

    @property
    def is_leader(self) -> bool:
        """Whether this process is the first of its group."""
        return self.group.rank() == 0

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        return self.group.size()

    @property
    def position(self) -> int:
        """Position of this process in the group."""
        return self.group.rank()

    def begin_all_to_all(
        self, values: Tensor, leaving: Sequence[int], arriving: Sequence[int], *, midway: bool = False
    ) -> Callable[[], Tensor]:
        """Begin to exchange rows with all processes of the group."""
        waits = Waits(self.device) if midway and self.alike else self.waits
        return begin_exchange(values, leaving, arriving, self.group, waits)

    def broadcast(self, message: Tensor) -> None:
        """Give all processes the leader's message, in their tensors."""
        with translate_rank_errors("other ranks of the group"), self.waits.waiting():
            dist.broadcast(message, group_src=0, group=self.group if message.device == self.device else self.control)


class LeaderP2P:
    """Point-to-point messages of the leader, which it broadcasts to its group."""

    def __init__(self, p2p: P2P, group: ViewGroup) -> None:
        self.rank = group.leader
        """Global rank of the leader."""
        self._p2p = p2p
        self._group = group

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Make memory for rows to be received into."""
        return self._p2p.empty(num_rows, width, dtype)

    def send(self, messages: Sequence[Message], microbatch: int) -> SendWork:
        """Begin to send messages, where this process is the leader."""
        return self._p2p.send(messages, microbatch) if self._group.is_leader else _Sent()

    def post(self, messages: Sequence[Message], microbatch: int) -> ReceiveWork:
        """Begin to receive messages, which the leader then broadcasts to its group."""
        return _BroadcastReceiveWork(
            self._p2p.post(messages, microbatch) if self._group.is_leader else None, messages, self._group
        )


class LeaderCollective:
    """A collective of leaders; each broadcasts what it receives to its group."""

    def __init__(self, collective: Collective | None, rank: int, size: int, group: TorchViewGroup) -> None:
        """Share a collective.

        Args:
            collective: connects the leaders; None on other ranks.
            rank: the leader's position in it.
            size: number of leaders.
            group: the group of this process.
        """
        self.rank, self.size, self.device = rank, size, group.device
        self._collective = collective
        self._group = group

    def all_to_all(
        self, modules: tuple[str, str], messages: Sequence[Tensor], num_bytes: Sequence[int], microbatch: int = 0
    ) -> CollectiveWork:
        """Exchange messages as `Collective`; those of the leader count."""
        own = self._collective
        work = None if own is None else own.all_to_all(modules, messages, num_bytes, microbatch)
        return _BroadcastCollectiveWork(work, num_bytes, self._group)


def leader_edges(edges: Mapping[str, EdgeP2P], group: ViewGroup) -> dict[str, EdgeP2P]:
    """The same edges for a whole group, whose leader uses them."""
    return {
        name: EdgeP2P(LeaderP2P(both.forward, group), LeaderP2P(both.backward, group)) for name, both in edges.items()
    }


class _Sent:
    """What the leader sends, for the others of its group."""

    def wait(self) -> None:
        """Return at once: the leader sends."""

    def is_completed(self) -> bool:
        """Return True: there is nothing to wait for."""
        return True


@dataclass(frozen=True, slots=True, eq=False)
class _BroadcastReceiveWork:
    """What the leader receives and broadcasts when it is waited for."""

    receive_work: ReceiveWork | None
    messages: Sequence[Message]
    group: ViewGroup

    def wait_headers(self) -> None:
        if self.receive_work is not None:
            self.receive_work.wait_headers()
        for message in self.messages:
            self.group.broadcast(message.header)

    def wait_rows(self) -> None:
        if self.receive_work is not None:
            self.receive_work.wait_rows()
        for message in self.messages:
            if message.rows.is_cuda:  # its memory may belong to another stream
                message.rows.record_stream(torch.cuda.current_stream(message.rows.device))
            self.group.broadcast(message.rows)


@dataclass(frozen=True, slots=True, eq=False)
class _BroadcastCollectiveWork:
    """What the leader receives of all ranks, and broadcasts when it is waited for."""

    work: CollectiveWork | None
    num_bytes: Sequence[int]
    group: TorchViewGroup

    def wait(self) -> list[Tensor]:
        if self.work is None:
            whole = torch.empty(sum(self.num_bytes), dtype=torch.uint8, device=self.group.device)
        else:
            whole = torch.cat(self.work.wait())
        self.group.broadcast(whole)
        return list(torch.split(whole, list(self.num_bytes)))
