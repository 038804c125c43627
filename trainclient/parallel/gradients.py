"""Gradients across processes: summed within a module, their norm taken over all modules."""

from collections import deque
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

BUCKET_BYTES = 25 << 20
"""Gradients reduced in one collective: large enough to use the network, small enough to overlap with the copying."""
MAX_BUCKETS = 2
"""Buckets on their way while the next one is copied together."""


def reduce_gradients(module: nn.Module, group: ProcessGroup, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Sum (not average) the gradients of every trainable parameter over a data-parallel group, in place.

    Losses are divided by the targets of the whole step, so the gradient of the step is the sum over ranks. Every
    parameter must have a gradient (`fill_missing_gradients`).
    """
    if group.size() == 1:
        return
    in_flight: deque[tuple[list[Tensor], Tensor, dist.Work | None]] = deque()
    for bucket in _buckets((p.grad for p in module.parameters() if p.grad is not None), bucket_bytes):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        in_flight.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
        if len(in_flight) > MAX_BUCKETS:
            _finish(*in_flight.popleft())
    for entry in in_flight:
        _finish(*entry)


def square_sum(module: nn.Module) -> Tensor:
    """Sum of the squares of all gradients of a module, float64 scalar."""
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in module.parameters() if p.grad is not None]
    return torch.stack(norms).square().sum()


def scale_gradients(module: nn.Module, factor: float) -> None:
    """Multiply all gradients of a module, in place."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    torch._foreach_mul_(gradients, factor)


def _finish(bucket: list[Tensor], flat: Tensor, work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
    totals = torch.split(flat, [gradient.numel() for gradient in bucket])
    for gradient, total in zip(bucket, totals, strict=True):
        gradient.copy_(total.view_as(gradient))


def _buckets(gradients: Iterable[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Runs of gradients of one dtype with at most `bucket_bytes`, or one gradient that is larger."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        more = gradient.numel() * gradient.element_size()
        if bucket and (size + more > bucket_bytes or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += more
    if bucket:
        yield bucket
