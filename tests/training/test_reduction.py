"""Sums of gradients over a group, in buckets, and their norm."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainclient.training import gradients
from trainclient.training.gradients import (
    Gradients,
    reduce_gradients,
    scale_gradients,
    scatter_gradients,
    square_sum,
)

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
        reduce_gradients(module.values, dist.ProcessGroupGloo(store, rank, 2), bucket_bytes)
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
    reduce_gradients(module.values, pair, bucket_bytes=1)  # type: ignore[arg-type]
    overlapped = [event for number in range(2, 8) for event in (f"begin {number}", f"wait {number - 2}")]
    assert events == ["begin 0", "begin 1", *overlapped, "wait 6", "wait 7"]
    assert all(torch.equal(a, b + 1) for a, b in zip(module.values, Parameters(0).values, strict=True))


def test_a_group_of_one_reduces_nothing_and_norms_and_factors_are_those_of_all_values() -> None:
    module = Parameters(0)
    reduce_gradients(module.values, dist.ProcessGroupGloo(dist.HashStore(), 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(module.values, Parameters(0).values, strict=True))
    flat = torch.cat([g.reshape(-1).double() for g in module.values])
    assert square_sum(module.values).dtype == torch.float64
    assert square_sum(module.values).shape == ()
    assert float(square_sum(module.values)) == pytest.approx(float((flat * flat).sum()), rel=1e-12)
    scale_gradients(module.values, 0.5)
    assert torch.equal(torch.cat([g.reshape(-1).double() for g in module.values]), 0.5 * flat)


def summed(dtype: torch.dtype, collect: bool) -> Tensor:
    """The gradient of a weight after 64 microbatches, of parameters of a dtype."""
    weight = nn.Parameter(torch.zeros(32, 16, dtype=dtype))
    gradients = Gradients({"w": weight, "idle": nn.Parameter(torch.zeros(3, dtype=dtype))}) if collect else None
    generator = torch.Generator().manual_seed(0)
    for _ in range(64):
        x = (torch.randn(8, 16, generator=generator) + 1).to(torch.bfloat16).to(dtype)
        (x @ weight.T).sum().backward()
    if gradients is None:
        return weight.grad if weight.grad is not None else torch.zeros(0)
    found = gradients.of_step()
    assert (found["idle"].tolist(), found["idle"].dtype) == ([0, 0, 0], torch.promote_types(dtype, torch.float32))
    assert gradients.of_step()["w"] is found["w"]
    total = found["w"].clone()
    gradients.drop()
    assert weight.grad is None
    assert float(gradients.of_step()["w"].abs().sum()) == 0
    return total


def test_sums_of_later_steps_take_no_new_memory_and_nothing_of_the_steps_before() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    gradients, seen = Gradients({"w": weight}), []
    for factor in (1.0, 2.0, 4.0):
        for _ in range(2):
            (factor * weight).sum().backward()
        found = gradients.of_step()["w"]
        seen.append((found.data_ptr(), found.tolist()))
        gradients.drop()
    assert [values for _, values in seen] == [[2.0] * 3, [4.0] * 3, [8.0] * 3]
    assert len({memory for memory, _ in seen}) == 1


def test_bfloat16_gradients_of_64_microbatches_are_summed_in_float32() -> None:
    exact = summed(torch.float64, collect=False)
    ours, naive = summed(torch.bfloat16, collect=True), summed(torch.bfloat16, collect=False)
    assert ours.dtype == torch.float32

    def distance(found: Tensor) -> float:
        return float(torch.linalg.vector_norm(found.double() - exact) / torch.linalg.vector_norm(exact))

    assert distance(ours) < 1e-3  # each microbatch's own gradient is rounded to bfloat16 once
    assert distance(naive) > 5 * distance(ours)
    assert torch.equal(summed(torch.float64, collect=True), exact)
    assert torch.equal(summed(torch.float32, collect=True), summed(torch.float32, collect=False))


def test_sums_over_ranks_are_taken_in_float32() -> None:
    store = dist.HashStore()

    def reduced(rank: int) -> Tensor:
        weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        gradients = Gradients({"w": weight})
        (weight * (256.0 if rank == 0 else 1.0)).sum().backward()
        found = gradients.of_step()
        reduce_gradients(found.values(), dist.ProcessGroupGloo(store, rank, 2))
        return found["w"]

    with ThreadPoolExecutor(2) as threads:
        assert [float(total) for total in threads.map(reduced, range(2))] == [257, 257]  # 256 in bfloat16


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 20])
def test_every_rank_gets_the_sums_of_its_rows(ranks: int, bucket_bytes: int) -> None:
    """Shares are those of torch.chunk: equal but for the last ones, which may be smaller or empty."""
    shapes = {"a": (4, 2), "b": (1, 3), "c": (5,), "d": (6, 1, 2), "e": (2, 0)}
    store = dist.HashStore()

    def gradients_of(rank: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(rank)
        types = {name: torch.float64 if name == "c" else torch.float32 for name in shapes}
        return {name: torch.randn(s, generator=generator).to(types[name]) for name, s in shapes.items()}

    def scattered(rank: int) -> dict[str, Tensor]:
        group = dist.ProcessGroup(store, rank, ranks)
        gloo = dist.ProcessGroup.BackendType.GLOO
        group._register_backend(torch.device("cpu"), gloo, dist.ProcessGroupGloo(store, rank, ranks))
        return scatter_gradients(gradients_of(rank), group, bucket_bytes)

    with ThreadPoolExecutor(ranks) as threads:
        results = list(threads.map(scattered, range(ranks)))
    for name, shape in shapes.items():
        total = sum((gradients_of(rank)[name] for rank in range(1, ranks)), gradients_of(0)[name])
        chunks = [*total.chunk(ranks), *[total[:0]] * ranks]
        for rank, found in enumerate(results):
            assert list(found) == list(shapes)
            assert found[name].dtype == total.dtype
            torch.testing.assert_close(found[name], chunks[rank], rtol=1e-6, atol=1e-6)
            assert found[name].shape[1:] == shape[1:]
