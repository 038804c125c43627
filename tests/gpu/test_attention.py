"""The flash kernel, which half precision takes on GPUs, against the same segments one by one in float32."""

import pytest
import torch
from torch import Tensor

from trainclient.models.attention import Segments, packed_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda")
LENGTHS = [300, 1, 0, 77, 1024, 5]
KEYS = [40, 0, 3, 129, 256, 1]


def partition(lengths: list[int]) -> Segments:
    return Segments.from_offsets("offsets", torch.tensor([0, *lengths]).cumsum(0), sum(lengths), GPU)


def drawn(rows: int, heads: int, head_dim: int) -> Tensor:
    return torch.randn(rows, heads, head_dim, device=GPU, dtype=torch.bfloat16)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize("groups", [8, 2], ids=["each-its-own", "grouped"])
@pytest.mark.parametrize("kind", ["causal", "whole", "cross"])
def test_the_kernel_computes_what_float32_does(head_dim: int, groups: int, kind: str) -> None:
    torch.manual_seed(1)
    keys = KEYS if kind == "cross" else LENGTHS
    half = [drawn(sum(LENGTHS), 8, head_dim), *(drawn(sum(keys), groups, head_dim) for _ in range(2))]
    full = [tensor.float() for tensor in half]
    upstream = drawn(sum(LENGTHS), 8, head_dim)
    found, expected = [], []
    for tensors, results in ((half, found), (full, expected)):
        for tensor in tensors:
            tensor.requires_grad_()
        args = (partition(LENGTHS), partition(keys)) if kind == "cross" else (partition(LENGTHS),)
        out = packed_attention(*tensors, *args, causal=kind == "causal")
        out.backward(upstream.to(out.dtype))
        results.extend([out, *(tensor.grad for tensor in tensors)])
    for ours, reference in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), reference, rtol=0.02, atol=0.02)
