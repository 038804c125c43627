"""What concerns the parameters of any module: their initial values and their gradients."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

MAX_DRAWN = 8
"""Parameters whose values are drawn at once: each takes a core, and float32 values of all of it."""


def initialise(module: nn.Module, seed: int, prefix: str) -> None:
    """Set every parameter as a pure function of (seed, prefix, parameter name, shape).

    A pipeline stage names its parameters as the whole model does, so a split into stages, or a layout of ranks, gives
    the same weights. Values are drawn on the CPU in float32, then rounded to the parameter's dtype.

    Linear weights get a standard deviation of 1 / sqrt(inputs), embeddings 1, biases 0, norms 1; a module (or the
    owner of a bare parameter) that sets `initial_std` overrules it, or names constants in `initial_values`, or
    functions of the shape in `initial_tables`.

    Args:
        module: a module whose memory exists (not on the meta device).
        seed: the job's seed.
        prefix: the module's name in the job.

    Raises:
        ValueError: a parameter lies on the meta device.
    """

    def fill(owner: nn.Module, name: str, parameter: nn.Parameter, full_name: str) -> None:
        with torch.no_grad():
            parameter.copy_(_initial_value(owner, name, parameter.shape, seed, full_name))

    found = []
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            full_name = ".".join(part for part in (prefix, path, name) if part)
            if parameter.is_meta:
                raise ValueError(f"{full_name} has no memory yet; call to_empty(device=...) before initialise")
            found.append((owner, name, parameter, full_name))
    with ThreadPoolExecutor(MAX_DRAWN) as threads:  # drawing normals takes one core for each parameter
        for filled in [threads.submit(fill, *one) for one in found]:
            filled.result()


def units(network: nn.Module) -> Iterator[nn.Module]:
    """The elements of the network's own lists, that have parameters."""
    for child in network.children():
        elements = child.children() if isinstance(child, nn.ModuleList | nn.ModuleDict) else ()
        yield from (unit for unit in elements if next(unit.parameters(), None) is not None)


def _initial_value(owner: nn.Module, name: str, shape: torch.Size, seed: int, full_name: str) -> Tensor:
    constants: Mapping[str, float] = getattr(owner, "initial_values", {})
    if name in constants:
        return torch.full(shape, constants[name])
    tables: Mapping[str, Callable[[torch.Size], Tensor]] = getattr(owner, "initial_tables", {})
    if name in tables:
        return tables[name](shape)
    if isinstance(owner, nn.RMSNorm | nn.LayerNorm):
        return torch.ones(shape) if name == "weight" else torch.zeros(shape)
    if name == "bias":
        return torch.zeros(shape)
    default = 1.0 if isinstance(owner, nn.Embedding) else shape[-1] ** -0.5
    std = float(getattr(owner, "initial_std", default))
    digest = hashlib.sha256(f"{seed}/{full_name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32).mul_(std)
