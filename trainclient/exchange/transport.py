"""Transfers between processes, in one direction of one way of the graph: stamps between the CPUs, rows beside them."""

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainclient.exchange.grouped import SharedSequences

_PLACE = re.compile(r"^\[[^\]]*\]\s*(err == 0\. )?")
"""Where in its own source torch raised an error."""


class PeerLostError(RuntimeError):
    """Another process ended, or did not answer in time."""


def plain_text(error: BaseException) -> str:
    """What an error of torch says, without where in its own source."""
    return _PLACE.sub("", str(error))


def lacks_memory(error: BaseException) -> bool:
    """Whether this process alone has failed, since its device or machine has no more memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


@contextmanager
def contact(peers: str) -> Iterator[None]:
    """Turn what a backend raises when the other end is gone into PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        if lacks_memory(error):
            raise
        raise _lost(peers, error) from error


@contextmanager
def contact_of_torch() -> Iterator[None]:
    """The same around code of which other parts fail, too: for collectives of torch's own, such as gathering shares
    (FSDP2), sums of tensor-parallel peers (DTensor) and checkpoints. Other errors pass."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):
            raise _lost("other ranks", error) from error
        raise


def _lost(peers: str, error: RuntimeError) -> PeerLostError:
    reason = plain_text(error).split(". ")[0].splitlines()
    return PeerLostError(
        f"lost contact to {peers} ({reason[0] if reason else type(error).__name__}); see what the process that ended "
        "first has reported"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What moves between two processes; the memory to receive it in where it has yet to come."""

    peer: int
    """Global rank at the other end."""
    stamp: Tensor
    """uint8 [n] on the CPU."""
    rows: Tensor
    """[r, width], contiguous, on the device of the computation."""


class Departure(Protocol):
    """Messages of one microbatch on their way out."""

    def wait(self) -> None:
        """Wait until their memory may be used again; PeerLostError names the process that is gone."""

    def has_left(self) -> bool:
        """Whether `wait` is known to return at once; gloo cannot tell, and so says no."""


class Receipt(Protocol):
    """Messages of one microbatch on their way in."""

    def wait_stamps(self) -> None:
        """Wait on the CPU until all stamps are there; PeerLostError names the process that is gone."""

    def wait_rows(self) -> None:
        """Let what is computed next wait for the rows: on CUDA the device does, and the CPU goes on."""


class Channel(Protocol):
    """One direction of one way, of which a process sends or receives. Messages of two processes arrive in order."""

    @property
    def rank(self) -> int:
        """Global rank of this process."""

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Memory [num_rows, width] for rows to arrive in while something else is computed."""

    def send(self, messages: Sequence[Message], microbatch: int) -> Departure:
        """Begin to send all messages of a microbatch at once."""

    def post(self, messages: Sequence[Message], microbatch: int) -> Receipt:
        """Begin to receive all messages of a microbatch at once, whether or not they are under way."""


class Arrival(Protocol):
    """Messages on their way from all ranks."""

    def wait(self) -> list[Tensor]:
        """The messages, by the rank that sent them, uint8 each; PeerLostError if a process is gone."""


class Collective(Protocol):
    """All ranks, which hand messages to each other together and in the same order."""

    @property
    def rank(self) -> int:
        """Of this process."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def device(self) -> torch.device:
        """Where messages lie."""

    def all_to_all(
        self, way: tuple[str, str], messages: Sequence[Tensor], num_bytes: Sequence[int], microbatch: int = 0
    ) -> Arrival:
        """Begin to hand a message, uint8 [any], to each rank, and to take `num_bytes` of each.

        Args:
            way: the modules between which the rows cross, as rows go forward.
            messages: one for each rank, on the device of the computation.
            num_bytes: of the message from each rank.
            microbatch: with which the round begins, where rows of rounds cross.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Directions:
    """Both directions of a way."""

    forward: Channel
    """Embeddings, activations and conditions, from chunk to chunk."""
    backward: Channel
    """Their gradients, the other way."""


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """How a process reaches the others."""

    ways: Mapping[str, Directions]
    """Those that it is at an end of, by their names."""
    together: Collective | None
    """Many processes at once, of which this may be none (`Topology.together`): rows that cross between phases, and
    their gradients; features that meet in contrastive batches."""
    shared: SharedSequences | None = None
    """Ranks of the backbone with which this one may share sequences, if any."""
    headers: Collective | None = None
    """Those of `together` between their CPUs: what they say of rows that cross, so that no CPU waits for a device."""


class GroupChannel:
    """A channel over process groups; what a process sends itself stays within it.

    Its rows have a group of their own: NCCL runs what is sent and received in one group in the order of the calls, and
    so nothing else can stand before them.
    """

    def __init__(
        self, rank: int, device: torch.device, rows: ProcessGroup | None, stamps: ProcessGroup, tag: int
    ) -> None:
        """Join the other processes.

        Args:
            rank: global rank of this process.
            device: of the rows.
            rows: of the processes at both ends, for this direction alone; None where no other process is there.
            stamps: of all processes, over gloo.
            tag: tells the stamps of this channel from those of others.
        """
        self.rank = rank
        self._device = device
        self._rows = rows
        self._stamps = stamps
        self._tag = tag
        self._own: deque[Message] = deque()
        # Receives wait for what their stream was given before. Nothing is computed on this one.
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """See `Channel`."""
        with torch.cuda.stream(self._aside) if self._aside is not None else nullcontext():
            return torch.empty(num_rows, width, dtype=dtype, device=self._device)

    def send(self, messages: Sequence[Message], microbatch: int) -> Departure:
        """See `Channel`."""
        del microbatch
        self._own.extend(m for m in messages if m.peer == self.rank)
        return _Departure(*self._begin(dist.isend, messages), messages)

    def post(self, messages: Sequence[Message], microbatch: int) -> Receipt:
        """See `Channel`."""
        del microbatch
        with torch.cuda.stream(self._aside) if self._aside is not None else nullcontext():
            begun = self._begin(dist.irecv, messages)
        return _Receipt(*begun, messages, [m for m in messages if m.peer == self.rank], self._own)

    def _begin(self, begin: Callable[..., Any], messages: Sequence[Message]) -> "tuple[_Works, _Works]":
        others = [m for m in messages if m.peer != self.rank]
        rows = [dist.P2POp(begin, m.rows, m.peer, self._rows, self._tag) for m in others if m.rows.numel()]
        with contact(_ranks(others)):
            stamps = [begin(m.stamp, m.peer, group=self._stamps, tag=self._tag) for m in others]
            return _Works(others, stamps), _Works(others, dist.batch_isend_irecv(rows) if rows else [])


def _ranks(messages: Sequence[Message]) -> str:
    """The processes at the other ends, for messages."""
    return f"rank {' or '.join(str(m.peer) for m in messages)}"


@dataclass(frozen=True, slots=True, eq=False)
class _Works:
    """What a backend has begun for some messages; NCCL makes one work of all."""

    messages: Sequence[Message]
    works: Sequence[dist.Work]

    def wait(self) -> None:
        several = len(self.works) != len(self.messages)
        for i, work in enumerate(self.works):
            with contact(_ranks(self.messages if several else self.messages[i : i + 1])):
                work.wait()


@dataclass(frozen=True, slots=True, eq=False)
class _Departure:
    stamps: _Works
    rows: _Works
    messages: Sequence[Message]
    """Their memory is in use."""

    def wait(self) -> None:
        self.stamps.wait()
        self.rows.wait()

    def has_left(self) -> bool:
        if self.stamps.works and not self.rows.works:  # none of them has rows
            return False
        return all(work.is_completed() for work in self.rows.works)


@dataclass(frozen=True, slots=True, eq=False)
class _Receipt:
    stamps: _Works
    rows: _Works
    messages: Sequence[Message]
    own: Sequence[Message]
    """Of these the ones that this process sends itself."""
    sent: deque[Message]
    """What it has sent itself."""

    def wait_stamps(self) -> None:
        self.stamps.wait()
        for message in self.own:
            found = self.sent.popleft()
            message.stamp.copy_(found.stamp)
            message.rows.copy_(found.rows)

    def wait_rows(self) -> None:
        self.rows.wait()
        for message in self.messages:
            if message.rows.is_cuda:  # its memory belongs to the stream in which it was received
                message.rows.record_stream(torch.cuda.current_stream(message.rows.device))
