"""Blocks compiled by torch.compile, one by one, for rows and segments of any number."""

import functools
import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from trainclient.models.attention import flash_applies, packed_attention, traceable_attention
from trainclient.models.layers import CrossAttention, SelfAttention
from trainclient.models.parameters import units


def require_compiler(device: torch.device) -> None:
    """Raise ValueError unless torch.compile finds on this machine what it makes code with."""
    if device.type == "cuda" and find_spec("triton") is None:
        raise ValueError("compile needs triton, which comes with torch for CUDA; install it, or leave compile out")
    default, variable = ("gcc", "CC") if device.type == "cuda" else ("g++", "CXX")
    name = os.environ.get(variable, default)
    if shutil.which(name) is None:
        raise ValueError(
            f"compile needs a compiler, and there is no {name} on PATH; install it, name another one in {variable}, or "
            "leave compile out"
        )


def compile_blocks(network: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Have the blocks of a network compiled when they run first, all of a kind at once.

    Where the flash kernel applies, a block is one graph with the kernel in it. Elsewhere attention goes segment by
    segment, and the number of its segments may not enter the code: it runs as it is, between two graphs. Where ranks
    share rows, projections are part of the attention, since they are on their way one after the other.

    Args:
        network: whose blocks are to be compiled.
        device: on which it will compute.
        dtype: in which it will compute.
    """
    outside = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]
    for block in units(network):
        block.forward = _compiled(block.forward)  # not the call: hooks around it stay as they are
        for module in block.modules():
            if isinstance(module, SelfAttention | CrossAttention):
                two_way = isinstance(module, SelfAttention) and module.two_way
                flash = flash_applies(device, dtype, module.head_dim) and not two_way
                module.attend = traceable_attention() if flash else outside
            if isinstance(module, SelfAttention):
                together = torch.compiler.disable(module.attend_together)  # type: ignore[no-untyped-call]
                module.attend_together = together  # type: ignore[method-assign]


def _compiled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One code for two rows and more; fewer run as they are, since each number would be compiled for itself."""
    compiled = torch.compile(forward, dynamic=True)

    @functools.wraps(forward)
    def run(x: Tensor, *rest: object) -> Tensor:
        return (compiled if len(x) > 1 else forward)(x, *rest)

    return run
