"""Packed attention against one dense softmax per segment."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainclient.models.attention import Segments, packed_attention, traceable_attention

CPU = torch.device("cpu")


def partition(lengths: list[int]) -> Segments:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return Segments.from_offsets("offsets", offsets, sum(lengths), CPU)


def dense(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("thd,shd->hts", query, key) / math.sqrt(query.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), value)


def draw(rows: int, heads: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, heads, 8, dtype=torch.float64, generator=generator)


@given(st.lists(st.integers(0, 7), max_size=6), st.sampled_from([1, 2, 4]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_packed_equals_dense_segment_by_segment(lengths: list[int], groups: int, causal: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (draw(sum(lengths), heads, generator) for heads in (4, groups, groups))
    got = packed_attention(query, key, value, partition(lengths), causal=causal)
    parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True) if lengths else ()
    expected = [dense(q, k, v, causal) for q, k, v in parts if len(q)]
    assert got.shape == query.shape
    torch.testing.assert_close(got, torch.cat([*expected, query[:0]]), rtol=1e-12, atol=1e-12)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6))
@settings(max_examples=60, deadline=None)
def test_cross_attention_stays_inside_its_segment(sizes: list[tuple[int, int]]) -> None:
    generator = torch.Generator().manual_seed(2)
    rows, columns = [t for t, _ in sizes], [s for _, s in sizes]
    query = draw(sum(rows), 2, generator)
    key, value = draw(sum(columns), 2, generator), draw(sum(columns), 2, generator)
    got = packed_attention(query, key, value, partition(rows), partition(columns))
    expected, t, s = [query[:0]], 0, 0
    for n, m in sizes:
        part = query[t : t + n]
        alone = dense(part, key[s : s + m], value[s : s + m], False) if m else torch.zeros_like(part)
        expected.append(alone)
        t, s = t + n, s + m
    torch.testing.assert_close(got, torch.cat(expected), rtol=1e-12, atol=1e-12)


def test_gradients_match_finite_differences() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = [draw(5, heads, generator).requires_grad_() for heads in (4, 2, 2)]
    segments = partition([2, 0, 3])
    assert torch.autograd.gradcheck(lambda q, k, v: packed_attention(q, k, v, segments, causal=True), inputs)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 3], "from 0 to 3"),
        ([1, 4], "from 1 to 4"),
        ([0, 3, 2, 4], "fall at entry 2"),
        ([], "are empty"),
        ([0.0, 4.0], "integer dtype"),
        ([[0, 4]], "shape"),
    ],
)
def test_offsets_that_do_not_partition_are_refused(offsets: list[int], message: str) -> None:
    values = torch.tensor(offsets) if offsets else torch.zeros(0, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        Segments.from_offsets("cu_lengths", values, 4, CPU)


def test_partitions_must_match() -> None:
    x = torch.zeros(2, 1, 8)
    with pytest.raises(ValueError, match="2 query segments meet 1 key segments"):
        packed_attention(x, x, x, partition([1, 1]), partition([2]))
    with pytest.raises(ValueError, match="causal"):
        packed_attention(x, x, x, partition([2]), partition([2]), causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_the_flash_call_fits_the_installed_torch(causal: bool) -> None:
    """On the meta device, where the kernel's contract can be checked without an accelerator."""
    query, key, value = (
        torch.empty(4, heads, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (4, 2, 2)
    )
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    segments = Segments(offsets, (1, 3), 3)
    out = traceable_attention()(query, key, value, segments, causal=causal)
    assert out.shape == query.shape
    out.backward(torch.empty_like(out))
    assert key.grad is not None
    assert key.grad.shape == key.shape
