"""How a process reaches the others: point-to-point messages along edges, and collectives, over process groups."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainclient.exchange.host_staging import HostStaging
from trainclient.exchange.lost_ranks import translate_rank_errors
from trainclient.exchange.view_groups import SharedSequences


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A message to send, or the memory to receive one in."""

    rank: int
    """Global rank at the other end."""
    header: Tensor
    """uint8 [n] on the CPU."""
    rows: Tensor
    """[r, width], contiguous, on the device of the computation."""


class SendWork(Protocol):
    """Messages of one microbatch that are being sent."""

    def wait(self) -> None:
        """Wait until their memory may be used again; RankLostError names the rank that is gone."""

    def is_completed(self) -> bool:
        """Whether `wait` would return at once; always False with gloo, which cannot tell."""


class ReceiveWork(Protocol):
    """Messages of one microbatch that are being received."""

    def wait_headers(self) -> None:
        """Wait on the CPU until all headers are there; RankLostError names the rank that is gone.

        Their rows have been given to the sender's device by then.
        """

    def wait_rows(self) -> None:
        """Wait for the rows; on CUDA only the current stream waits, and the CPU goes on."""


class P2P(Protocol):
    """One direction of one edge, in which a process sends or receives. Messages between two ranks arrive in order."""

    @property
    def rank(self) -> int:
        """Global rank of this process."""

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Memory [num_rows, width] for rows to arrive in while something else is computed."""

    def send(self, messages: Sequence[Message], microbatch: int) -> SendWork:
        """Begin to send all messages of a microbatch at once."""

    def post(self, messages: Sequence[Message], microbatch: int) -> ReceiveWork:
        """Begin to receive all messages of a microbatch at once, whether or not they have been sent."""


class CollectiveWork(Protocol):
    """Messages of all ranks that are being exchanged."""

    def wait(self) -> list[Tensor]:
        """Wait for the messages, uint8 each, by the rank that sent them; RankLostError if a rank is gone."""


class Collective(Protocol):
    """Ranks that exchange messages by collectives, all in the same order."""

    @property
    def rank(self) -> int:
        """This process's position among them."""

    @property
    def size(self) -> int:
        """Number of ranks that take part."""

    @property
    def device(self) -> torch.device:
        """The device of the messages."""

    def all_to_all(
        self, modules: tuple[str, str], messages: Sequence[Tensor], num_bytes: Sequence[int], microbatch: int = 0
    ) -> CollectiveWork:
        """Begin to send a message, uint8 [any], to each rank, and to receive `num_bytes` from each.

        Args:
            modules: names of the module that sends the rows in the forward pass, and of the one that receives them.
            messages: one for each rank, on the device of the computation.
            num_bytes: sizes of the messages from each rank.
            microbatch: the first one of the round.
        """


@dataclass(frozen=True, slots=True, eq=False)
class EdgeP2P:
    """Both directions of an edge."""

    forward: P2P
    """Embeddings, activations and conditions, from chunk to chunk."""
    backward: P2P
    """Gradients, from the target's chunk to the source's."""


@dataclass(frozen=True, slots=True, eq=False)
class Communicators:
    """How a process reaches the others."""

    edges: Mapping[str, EdgeP2P]
    """The edges that this process is at an end of, by name."""
    collective: Collective | None
    """Connects one of `Topology.collectives`; None on other ranks. It moves rows between phases, their gradients, and
    the features of contrastive batches."""
    shared: SharedSequences | None = None
    """Groups of backbone ranks with which this one may share sequences."""
    header_collective: Collective | None = None
    """Connects the CPUs of the same ranks, for headers, so that no CPU waits for a device."""


ROWS_OF_HOSTS: Final = 1 << 20
"""Added to the tag of a direction's headers, this is the tag of rows that go from host to host."""


class GroupP2P:
    """Point-to-point messages over process groups; what a process sends itself stays within it.

    Each direction of an edge has a group for its rows: NCCL runs the sends and receives of one group in the order of
    the calls, so no other transfer can block them.
    """

    def __init__(
        self, rank: int, staging: HostStaging, rows: ProcessGroup | None, headers: ProcessGroup, tag: int
    ) -> None:
        """Join the other processes.

        Args:
            rank: the global rank of this process.
            staging: whether rows go through hosts at present; shared by all directions of this process.
            rows: group of the ranks at both ends, for this direction alone; None where a rank sends only to itself.
            headers: group of all ranks, over gloo.
            tag: tells the headers of this direction from those of others.
        """
        self.rank = rank
        self._staging = staging
        self._rows = rows
        self._headers = headers
        self._tag = tag
        self._own: deque[Message] = deque()

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Make memory for rows to be received into."""
        aside = self._staging.aside
        with torch.cuda.stream(aside) if aside is not None else nullcontext():
            return torch.empty(num_rows, width, dtype=dtype, device=self._staging.device)

    def connect(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Exchange one byte with ranks to which this process sends here, and with those from which it receives.

        Both ends call this at the same point of their program: NCCL builds a connection at its first message, in both
        processes at once, and holds up each until the other one is there.
        """
        byte = partial(torch.zeros, 1, dtype=torch.uint8, device=self._staging.device)
        operations = [
            dist.P2POp(dist.isend, byte(), rank, self._rows, self._tag) for rank in targets if rank != self.rank
        ]
        operations += [
            dist.P2POp(dist.irecv, byte(), rank, self._rows, self._tag) for rank in sources if rank != self.rank
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()

    def send(self, messages: Sequence[Message], microbatch: int) -> SendWork:
        """Begin to send messages to other ranks."""
        del microbatch
        self._own.extend(m for m in messages if m.rank == self.rank)
        others = [m for m in messages if m.rank != self.rank]
        if self._staging.by_host:
            others = [replace(m, rows=m.rows.cpu()) for m in others]
            return _GroupSend(self._begin_headers(dist.isend, others), self._begin_copies(dist.isend, others), others)
        rows = self._begin_rows(dist.isend, others)  # before the headers, which say that the device has them
        return _GroupSend(self._begin_headers(dist.isend, others), rows, messages)

    def post(self, messages: Sequence[Message], microbatch: int) -> ReceiveWork:
        """Begin to receive messages from other ranks."""
        del microbatch
        others = [m for m in messages if m.rank != self.rank]
        own = [m for m in messages if m.rank == self.rank]
        headers = self._begin_headers(dist.irecv, others)
        if self._staging.by_host:
            copies = [replace(m, rows=torch.empty_like(m.rows, device="cpu")) for m in others]
            arriving = list(zip([m.rows for m in others], [m.rows for m in copies], strict=True))
            return _GroupReceive(headers, self._begin_copies(dist.irecv, copies), messages, own, self._own, arriving)
        begin = partial(self._begin_rows, dist.irecv, others)
        return _GroupReceive(headers, begin() if self._staging.ahead else begin, messages, own, self._own)

    def _begin_headers(self, begin: Callable[..., Any], others: Sequence[Message]) -> "_GroupWork":
        with translate_rank_errors(_ranks(others)):
            return _GroupWork(others, [begin(m.header, m.rank, group=self._headers, tag=self._tag) for m in others])

    def _begin_copies(self, begin: Callable[..., Any], others: Sequence[Message]) -> "_GroupWork":
        """The same for rows in the memory of hosts."""
        full, tag = [m for m in others if m.rows.numel()], self._tag + ROWS_OF_HOSTS
        with translate_rank_errors(_ranks(full)):
            return _GroupWork(full, [begin(m.rows, m.rank, group=self._headers, tag=tag) for m in full])

    def _begin_rows(self, begin: Callable[..., Any], others: Sequence[Message]) -> "_GroupWork":
        rows = [dist.P2POp(begin, m.rows, m.rank, self._rows, self._tag) for m in others if m.rows.numel()]
        stream = self._staging.aside if begin is dist.irecv else None
        with translate_rank_errors(_ranks(others)), nullcontext() if stream is None else torch.cuda.stream(stream):
            return _GroupWork(others, dist.batch_isend_irecv(rows) if rows else [])


def _ranks(messages: Sequence[Message]) -> str:
    """The ranks at the other ends, in words."""
    return f"rank {' or '.join(str(m.rank) for m in messages)}"


@dataclass(frozen=True, slots=True, eq=False)
class _GroupWork:
    """The works of some messages; NCCL makes one work of all."""

    messages: Sequence[Message]
    works: Sequence[dist.Work]

    def wait(self) -> None:
        several = len(self.works) != len(self.messages)
        for i, work in enumerate(self.works):
            with translate_rank_errors(_ranks(self.messages if several else self.messages[i : i + 1])):
                work.wait()


@dataclass(frozen=True, slots=True, eq=False)
class _GroupSend:
    headers: _GroupWork
    rows: _GroupWork
    messages: Sequence[Message]
    """The messages, whose memory is in use."""

    def wait(self) -> None:
        self.headers.wait()
        self.rows.wait()

    def is_completed(self) -> bool:
        if self.headers.works and not self.rows.works:  # none of them has rows
            return False
        return all(work.is_completed() for work in self.rows.works)


@dataclass(slots=True, eq=False)
class _GroupReceive:
    headers: _GroupWork
    rows: _GroupWork | Callable[[], _GroupWork]
    """The receives of the rows, or what begins them."""
    messages: Sequence[Message]
    own: Sequence[Message]
    """Messages that this process sends itself."""
    sent: deque[Message]
    """Sent messages that this process has yet to receive."""
    copies: Sequence[tuple[Tensor, Tensor]] = ()
    """Rows, and the memory of the host in which they arrive."""

    def wait_headers(self) -> None:
        self.headers.wait()
        if not isinstance(self.rows, _GroupWork):
            self.rows = self.rows()
        for message in self.own:
            found = self.sent.popleft()
            message.header.copy_(found.header)
            message.rows.copy_(found.rows)

    def wait_rows(self) -> None:
        if not isinstance(self.rows, _GroupWork):
            raise RuntimeError("rows are waited for before their headers")
        self.rows.wait()
        for rows, copy in self.copies:
            rows.copy_(copy)
        for message in self.messages:
            if message.rows.is_cuda:  # its memory belongs to the stream in which it was received
                message.rows.record_stream(torch.cuda.current_stream(message.rows.device))
