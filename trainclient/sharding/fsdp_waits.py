"""Where a unit that gathers its parameters for its passes (FSDP2) waits for other ranks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from trainclient.exchange.wait_times import Waits
from trainclient.torch_compat import reduce_scatter


def note_waits(unit: FSDPModule, device: str, waits: Waits) -> None:
    """Note what a unit waits for, after it was sharded and before it runs.

    It gathers in hooks, before its forward and, of its outputs, before its backward: ours stand around them. On a CPU
    the sums of gradients are waited for as well; on CUDA they are made beside what is computed.
    """
    if not isinstance(unit, nn.Module):
        raise TypeError(f"a {type(unit).__name__} is no module")
    unit.register_forward_pre_hook(lambda *_: waits.begin(), prepend=True)
    unit.register_forward_pre_hook(lambda *_: waits.end())
    unit.register_forward_hook(lambda _, __, output: _before_backward(output, waits.begin), prepend=True)
    unit.register_forward_hook(lambda _, __, output: _before_backward(output, waits.end))
    if device == "cpu":
        unit.set_custom_reduce_scatter(_Summing(waits))  # type: ignore[arg-type]


def _before_backward(output: Any, act: Callable[[], None]) -> None:
    for tensor in _differentiable(output):
        tensor.register_hook(lambda _: act())  # type: ignore[no-untyped-call]


def _differentiable(output: Any) -> Iterator[Tensor]:
    for found in tree_leaves(output):
        if isinstance(found, Tensor) and found.requires_grad:
            yield found


class _Summing:
    """Sums of gradients over ranks, which a CPU waits for."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is summed."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Sum the input over all ranks; the output is this rank's part."""
        with self._waits.waiting():
            return reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
