"""Sums of gradients over a group, in buckets, and their norm."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainclient.parallel import gradients
from trainclient.parallel.gradients import reduce_gradients, scale_gradients, square_sum

SHAPES = ((3,), (2, 2), (), (5,), (1, 3), (4,), (2,), (7,))


class Parameters(nn.Module):
    """Parameters with the gradients i, i + 1, ... of their rank; one has none."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for i, shape in enumerate(SHAPES):
            dtype = torch.float64 if i == 3 else torch.float32
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
            parameter.grad = torch.arange(parameter.numel(), dtype=dtype).reshape(shape) * 10**rank + i
            self.register_parameter(f"p{i}", parameter)
        self.idle = nn.Parameter(torch.zeros(2))

    @property
    def values(self) -> list[Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("bucket_bytes", "buckets"),
    [
        (1, [[3], [4], [1], [5], [3], [4], [2], [7]]),
        (27, [[3], [4, 1], [5], [3], [4, 2], [7]]),
        (28, [[3, 4], [1], [5], [3, 4], [2], [7]]),
        (32, [[3, 4, 1], [5], [3, 4], [2], [7]]),
        (1 << 20, [[3, 4, 1], [5], [3, 4, 2, 7]]),
    ],
)
def test_gradients_are_summed_in_buckets(bucket_bytes: int, buckets: list[list[int]]) -> None:
    found = gradients._buckets(Parameters(0).values, bucket_bytes)
    assert [[g.numel() for g in bucket] for bucket in found] == buckets
    assert list(gradients._buckets([], bucket_bytes)) == []
    store = dist.HashStore()

    def reduced(rank: int) -> list[Tensor]:
        module = Parameters(rank)
        before = module.values
        reduce_gradients(module, dist.ProcessGroupGloo(store, rank, 2), bucket_bytes)
        assert all(a is b for a, b in zip(before, module.values, strict=True))
        return module.values

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(reduced, range(2)))
    expected = [a + b for a, b in zip(Parameters(0).values, Parameters(1).values, strict=True)]
    for values in results:
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
    assert (gradients.BUCKET_BYTES, gradients.MAX_BUCKETS) == (25 << 20, 2)


def test_at_most_two_sums_are_on_their_way_while_the_next_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def begin(flat: Tensor, group: object, async_op: bool) -> object:
        assert (group, async_op) == (pair, True)
        number = sum(event.startswith("begin") for event in events)
        events.append(f"begin {number}")
        flat += 1
        return SimpleNamespace(wait=lambda: events.append(f"wait {number}"))

    pair = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(gradients.dist, "all_reduce", begin)
    module = Parameters(0)
    reduce_gradients(module, pair, bucket_bytes=1)  # type: ignore[arg-type]
    overlapped = [event for number in range(2, 8) for event in (f"begin {number}", f"wait {number - 2}")]
    assert events == ["begin 0", "begin 1", *overlapped, "wait 6", "wait 7"]
    assert all(torch.equal(a, b + 1) for a, b in zip(module.values, Parameters(0).values, strict=True))


def test_a_group_of_one_reduces_nothing_and_norms_and_factors_are_those_of_all_values() -> None:
    module = Parameters(0)
    reduce_gradients(module, dist.ProcessGroupGloo(dist.HashStore(), 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(module.values, Parameters(0).values, strict=True))
    flat = torch.cat([g.reshape(-1).double() for g in module.values])
    assert square_sum(module).dtype == torch.float64
    assert square_sum(module).shape == ()
    assert float(square_sum(module)) == pytest.approx(float((flat * flat).sum()), rel=1e-12)
    scale_gradients(module, 0.5)
    assert torch.equal(torch.cat([g.reshape(-1).double() for g in module.values]), 0.5 * flat)
