"""Sums over all processes that a device makes while its host goes on."""

from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class DeviceSums:
    """Float64 numbers of all processes, added up on the device.

    `on_device` may be computed with at once. Only who asks for `values` waits, and for no more than what the device was
    told before the sums were begun.
    """

    def __init__(self, own: Tensor, group: ProcessGroup) -> None:
        """Begin to add up [n] of this process and of all others, which do the same together."""
        dist.all_reduce(own, group=group)
        self.on_device = own
        self._copied: torch.cuda.Event | None = None
        self._host = own
        if own.is_cuda:
            self._host = torch.empty(own.shape, dtype=own.dtype, pin_memory=True)
            self._host.copy_(own, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    @cached_property
    def values(self) -> list[float]:
        """The sums as floats; waits until they are copied."""
        if self._copied is not None:
            self._copied.synchronize()
        found: list[float] = self._host.tolist()
        return found
