"""An operator that stands for the flash kernel, which needs a GPU.

It has a module of its own, since pytest gives a test module that others import two names, and so two lives: torch frees
an operator when its name is defined once more, and who calls the first one then crashes.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("disttrain_tests::rows_of_queries", mutates_args=())
def kernel(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, keys: Tensor, longest: int, most: int) -> Tensor:
    """Stands for the flash kernel: takes what that takes, for any number of segments."""
    assert len(offsets) == len(keys)
    assert longest == offsets.diff().max()
    assert most == keys.diff().max()
    return query + key.mean() + value.mean()


@kernel.register_fake
def _(query: Tensor, *others: object) -> Tensor:
    return torch.empty_like(query)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return gradient, *(gradient.mean().expand(shape).contiguous() for shape in ctx.shapes), None, None, None, None


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shapes = inputs[1].shape, inputs[2].shape


kernel.register_autograd(_backward, setup_context=_remember)
