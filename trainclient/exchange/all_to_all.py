"""All-to-alls between the phases of colocated modules, and, with gradients, between ranks that share sequences."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainclient.exchange.communicators import CollectiveWork
from trainclient.exchange.lost_ranks import translate_rank_errors
from trainclient.exchange.wait_times import Waits
from trainclient.exchange.weak_group import WeakGroup


class GroupCollective:
    """A process group as a `Collective`."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """Use a group, on which nothing else runs from another thread."""
        self.rank = group.rank()
        self.device = device
        self.size = group.size()
        self._group = group

    def all_to_all(
        self, modules: tuple[str, str], messages: Sequence[Tensor], num_bytes: Sequence[int], microbatch: int = 0
    ) -> CollectiveWork:
        """Send a message to each rank, and receive one from each."""
        del modules, microbatch
        with translate_rank_errors("other ranks"):
            sent = torch.cat(list(messages))
            return _GroupCollectiveWork(
                *begin(sent, [len(m) for m in messages], num_bytes, self._group), sent, num_bytes
            )


class _GroupCollectiveWork:
    def __init__(self, received: Tensor, work: dist.Work | None, sent: Tensor, num_bytes: Sequence[int]) -> None:
        self._received, self._work, self._num_bytes = received, work, num_bytes
        self._sent: Tensor | None = sent
        """Memory in use until the collective is over."""

    def wait(self) -> list[Tensor]:
        if self._work is not None:
            with translate_rank_errors("other ranks"):
                self._work.wait()
        self._sent = None
        return list(torch.split(self._received, list(self._num_bytes)))


def begin(
    values: Tensor, leaving: Sequence[int], arriving: Sequence[int], group: ProcessGroup
) -> tuple[Tensor, dist.Work | None]:
    """Hand `leaving` rows of values [n, ...] to each rank, and take `arriving` of each.

    Returns:
        What arrives, [sum(arriving), ...], and the work that must be done first, in which `values` are in use.
    """
    received = values.new_empty(sum(arriving), *values.shape[1:])
    work = dist.all_to_all_single(received, values, list(arriving), list(leaving), group=group, async_op=True)
    return received, work


def begin_exchange(
    values: Tensor, leaving: Sequence[int], arriving: Sequence[int], group: ProcessGroup, waits: Waits
) -> Callable[[], Tensor]:
    """`begin`, through which gradients go back: all ranks also run the backward together.

    Several may run at once, and overlap with what is computed between begin and wait, forward and backward. All ranks
    begin them in the same order, which autograd reverses by itself. Time spent waiting is recorded in `waits`.

    Returns:
        What waits, and gives what has arrived, [sum(arriving), ...]; RankLostError if another rank is gone.
    """
    flight = _Flight(leaving, arriving, group, waits)
    on_its_way: Tensor = _Begin.apply(values, flight)  # type: ignore[no-untyped-call]

    def arrived() -> Tensor:
        found: Tensor = _Wait.apply(on_its_way, flight)  # type: ignore[no-untyped-call]
        return found

    return arrived


def exchanged(values: Tensor, leaving: Sequence[int], arriving: Sequence[int], group: ProcessGroup) -> Tensor:
    """Exchange rows and wait until they are there."""
    return begin_exchange(values, leaving, arriving, group, Waits(values.device))()


class _Flight:
    """An all-to-all of rows, or of their gradients."""

    def __init__(self, leaving: Sequence[int], arriving: Sequence[int], group: ProcessGroup, waits: Waits) -> None:
        self._counts = leaving, arriving
        self._group = WeakGroup(group)  # graphs outlive groups
        self._waits = waits
        self._under_way: tuple[Tensor, Tensor, dist.Work | None] | None = None
        """Memory that is being sent, memory that is being received, and their work."""

    def begin(self, values: Tensor, *, back: bool) -> Tensor:
        """Memory of what arrives, to be read after `wait`."""
        values, counts, group = values.contiguous(), self._counts[::-1] if back else self._counts, self._group()
        with translate_rank_errors("other ranks"):
            received, work = begin(values, *counts, group)
        self._under_way = values, received, work
        return received

    def wait(self) -> Tensor:
        """Wait for the rows that arrive, and return them."""
        if self._under_way is None:
            raise RuntimeError("rows were waited for before their all-to-all began")
        _, received, work = self._under_way
        if work is not None:
            with translate_rank_errors("other ranks"), self._waits.waiting():
                work.wait()
        self._under_way = None
        return received


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.begin(values, back=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        del gradients  # those of the received rows, which are being sent back
        return ctx.flight.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, on_its_way: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.wait().view_as(on_its_way)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.flight.begin(gradients[0], back=True)
        return gradients[0], None
