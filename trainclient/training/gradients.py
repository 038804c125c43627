"""Gradients: summed over a step's microbatches and over the ranks of a module, their norm taken over all modules."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainclient.sharding.dtensors import local
from trainclient.torch_compat import reduce_scatter

BUCKET_BYTES = 25 << 20
"""Gradients reduced in one collective: large enough to use the network, small enough to overlap with the copying."""
MAX_BUCKETS = 2
"""Buckets on their way while the next one is copied together."""


class Gradients:
    """The gradients of a process's parameters, in float32 or better.

    Those of smaller parameters are added up in float32 as backward passes make them: in bfloat16, where the sum has
    eight bits, what the later ones of many microbatches add would be rounded away. The memory of these sums is taken
    once: it is the largest that a step would take and free.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Collect from now on the gradients of the parameters that are trained."""
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._sums: dict[nn.Parameter, Tensor] = {}
        """Sums of the gradients of the step so far."""
        self._memory: dict[nn.Parameter, Tensor] = {}
        """For sums in float32, of all steps."""
        for parameter in self._parameters.values():
            if parameter.dtype not in (torch.float32, torch.float64):
                parameter.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]

    def of_step(self) -> dict[str, Tensor]:
        """The sum for every parameter by its name, zeros where no microbatch gave one; of a part what is here.

        They are good until `drop`.

        Every rank has the same, whatever its microbatches held: one without images leaves some parameters out of the
        graph, yet all must bring the same tensors to the sum over ranks.
        """
        for parameter in self._parameters.values():
            if parameter not in self._sums:
                found = parameter.grad
                self._sums[parameter] = self._sum_of(parameter).zero_() if found is None else local(found)
        return {name: self._sums[parameter] for name, parameter in self._parameters.items()}

    def drop(self) -> None:
        """Forget the gradients of the step."""
        self._sums.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _add(self, parameter: Tensor) -> None:
        """Move a gradient that a backward pass has made into the sum."""
        if not isinstance(parameter, nn.Parameter) or parameter.grad is None:
            return
        total, gradient = self._sums.get(parameter), local(parameter.grad)
        if total is None:
            self._sums[parameter] = self._sum_of(parameter).copy_(gradient)
        else:
            total += gradient
        parameter.grad = None

    def _sum_of(self, parameter: nn.Parameter) -> Tensor:
        """Memory for a parameter's sum, with whatever stands in it."""
        if parameter not in self._memory:
            at_least = torch.promote_types(parameter.dtype, torch.float32)
            self._memory[parameter] = torch.empty_like(local(parameter), dtype=at_least)
        return self._memory[parameter]


def reduce_gradients(gradients: Iterable[Tensor], group: ProcessGroup, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Sum (not average) gradients over a data-parallel group, in place; all its ranks bring the same shapes in order.

    Losses are divided by the targets of the whole step, so the gradient of the step is the sum over ranks.
    """
    if group.size() == 1:
        return
    in_flight: deque[tuple[list[Tensor], Tensor, dist.Work | None]] = deque()
    for bucket in _buckets(gradients, bucket_bytes):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        in_flight.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
        if len(in_flight) > MAX_BUCKETS:
            _finish(*in_flight.popleft())
    for entry in in_flight:
        _finish(*entry)


def scatter_gradients(
    gradients: Mapping[str, Tensor], group: ProcessGroup, bucket_bytes: int = BUCKET_BYTES
) -> dict[str, Tensor]:
    """Sum gradients over a data-parallel group; every rank gets the sums of its share of their rows (dim 0).

    Shares are those of `torch.chunk`, as FSDP2 has them: ceil(rows / ranks) each, the last ones fewer or none.

    Args:
        gradients: at least one-dimensional, the same shapes in the same order on all ranks.
        group: of the ranks.
        bucket_bytes: of gradients that are summed in one collective.
    """
    found: dict[str, Tensor] = {}
    in_flight: deque[tuple[list[str], Tensor, dist.Work | None]] = deque()

    def finish(names: list[str], share: Tensor, work: dist.Work | None) -> None:
        if work is not None:
            work.wait()
        shapes = [gradients[name].shape for name in names]
        found.update(zip(names, _shares(share, shapes, group.size(), group.rank()), strict=True))

    names = iter(gradients)
    for bucket in _buckets(gradients.values(), bucket_bytes):
        flat = torch.cat([_rows_of_ranks(gradient, group.size()) for gradient in bucket], dim=1)
        share = flat.new_empty(flat.shape[1])
        work = reduce_scatter(share, flat.view(-1), group=group, async_op=True)
        in_flight.append(([next(names) for _ in bucket], share, work))
        if len(in_flight) > MAX_BUCKETS:
            finish(*in_flight.popleft())
    for entry in in_flight:
        finish(*entry)
    return found


def square_sum(gradients: Iterable[Tensor]) -> Tensor:
    """Sum of the squares of all gradients, float64 scalar."""
    found = list(gradients)
    if not found:  # all parameters are frozen
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(found, 2, torch.float64)).square().sum()


def scale_gradients(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply all gradients, in place."""
    found = list(gradients)
    if found:  # none where all parameters are frozen
        torch._foreach_mul_(found, factor)


def _finish(bucket: list[Tensor], flat: Tensor, work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
    totals = torch.split(flat, [gradient.numel() for gradient in bucket])
    for gradient, total in zip(bucket, totals, strict=True):
        gradient.copy_(total.view_as(gradient))


def _rows_of_ranks(gradient: Tensor, ranks: int) -> Tensor:
    """A gradient as [ranks, numbers of a share]; shares that are smaller than the first one end with zeros."""
    rows = gradient.reshape(len(gradient), -1)
    padding = -(-len(rows) // ranks) * ranks - len(rows)
    return nn.functional.pad(rows, (0, 0, 0, padding)).view(ranks, -1)


def _shares(share: Tensor, shapes: list[torch.Size], ranks: int, rank: int) -> list[Tensor]:
    """What a rank got of gradients of these shapes, without what was added to fill."""
    found, offset = [], 0
    for shape in shapes:
        largest, row = -(-shape[0] // ranks), shape[1:].numel()
        rows = min(largest, max(0, shape[0] - rank * largest))
        found.append(share[offset : offset + rows * row].view(rows, *shape[1:]))
        offset += largest * row
    return found


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
