"""What every rank hands to every other at once: rows that cross between phases, or within one with their gradients."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainclient.exchange.transport import Arrival, contact


class GroupCollective:
    """A process group as a `Collective`."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """Use a group, on which nothing else runs from another thread."""
        self.rank = group.rank()
        self.device = device
        self.size = group.size()
        self._group = group

    def all_to_all(
        self, way: tuple[str, str], messages: Sequence[Tensor], num_bytes: Sequence[int], microbatch: int = 0
    ) -> Arrival:
        """See `Collective`."""
        del way, microbatch
        with contact("other ranks"):
            sent = torch.cat(list(messages))
            return _Arrival(*begin(sent, [len(m) for m in messages], num_bytes, self._group), sent, num_bytes)


class _Arrival:
    def __init__(self, received: Tensor, work: dist.Work | None, sent: Tensor, num_bytes: Sequence[int]) -> None:
        self._received, self._work, self._num_bytes = received, work, num_bytes
        self._sent: Tensor | None = sent
        """Kept until it has left."""

    def wait(self) -> list[Tensor]:
        """See `Arrival`."""
        if self._work is not None:
            with contact("other ranks"):
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


def exchanged(values: Tensor, leaving: Sequence[int], arriving: Sequence[int], group: ProcessGroup) -> Tensor:
    """`begin` to its end, through which gradients go back: all ranks also run the backward together.

    Returns:
        What arrives, [sum(arriving), ...].

    Raises:
        PeerLostError: another rank is gone.
    """
    found: Tensor = _Exchange.apply(values, leaving, arriving, group)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, leaving: Sequence[int], arriving: Sequence[int], group: ProcessGroup
    ) -> Tensor:
        ctx.way = arriving, leaving, group
        return _wait(values, leaving, arriving, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _wait(gradients[0], *ctx.way), None, None, None


def _wait(values: Tensor, leaving: Sequence[int], arriving: Sequence[int], group: ProcessGroup) -> Tensor:
    with contact("other ranks"):
        received, work = begin(values.contiguous(), leaving, arriving, group)
        if work is not None:
            work.wait()
    return received
