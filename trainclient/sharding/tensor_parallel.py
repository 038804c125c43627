"""Tensor parallelism: ranks split the matrices of a network's layers, and compute the same rows together.

As in Megatron-LM (arXiv 1909.08053, section 3), with torch's DTensor: the first projections of a layer are split by
their outputs, the last one by its inputs, and its results are summed. A layer costs one all-reduce forward and one
backward. Everything else is replicated.

The low-rank adapter of a projection is split like the projection itself, by its outputs or its inputs. The tensor
between its two thin layers is replicated, which costs one all-reduce of few columns.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from trainclient.models.layers import SplitLayer
from trainclient.models.lora import AdaptedLinear

_OUTPUTS: Final = 0
_INPUTS: Final = 1
"""Dimensions of a linear layer's weight."""


def split(network: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Keep only this rank's part of a network, in place; a collective.

    Args:
        network: whole, with its values, the same on all ranks; on any device.
        name: of its module, for errors.
        mesh: the tensor-parallel ranks. What is split moves to their device.

    Raises:
        ValueError: nothing of it can be split, or a projection not into equal parts.
    """
    layers = {path: layer for path, layer in network.named_modules() if isinstance(layer, SplitLayer)}
    if not layers:
        raise ValueError(
            f"module {name} has tp {mesh.size()}, but no layer of its network is a SplitLayer, which says how it is "
            "split; derive its layers from that, or set tp to 1"
        )
    for path, layer in layers.items():
        for dim, paths in ((_OUTPUTS, layer.columns), (_INPUTS, layer.rows)):
            for own_path in paths:
                _split(_linear(f"{name}.{path}.{own_path}", layer.get_submodule(own_path), mesh.size(), dim), mesh, dim)
        layer.replicated = partial(_replicated, mesh)
        layer.register_forward_pre_hook(partial(_alike, mesh))


def tensor_parallel_parameters(network: nn.Module) -> set[nn.Parameter]:
    """The parameters of a whole network that tensor parallelism splits; all others are replicated."""
    return {
        parameter
        for layer in network.modules()
        if isinstance(layer, SplitLayer)
        for dim, paths in ((_OUTPUTS, layer.columns), (_INPUTS, layer.rows))
        for path in paths
        for _, _, parameter, along in _parts(layer.get_submodule(path), dim)
        if along is not None
    }


def _alike(mesh: DeviceMesh, _layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs of a layer as replicated tensors: so their gradients are summed over the ranks
    once for the layer, not once for each projection."""
    return tuple(
        DTensor.from_local(x, mesh, [Replicate()], run_check=False) if isinstance(x, Tensor) else x for x in inputs
    )


def _replicated(mesh: DeviceMesh, weight: Tensor) -> Tensor:
    """A weight that acts within each rank's part: its gradient is summed over the ranks."""
    return DTensor.from_local(weight, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _linear(path: str, projection: nn.Module, tp: int, dim: int) -> nn.Linear:
    """A projection that can be split evenly."""
    if not isinstance(projection, nn.Linear):
        raise ValueError(f"{path} is a {type(projection).__name__}; a Linear is required, or tp 1")
    size, what = projection.weight.shape[dim], ("outputs", "inputs")[dim]
    if size % tp:
        raise ValueError(f"{path} has {size} {what} to split, which is no multiple of tp {tp}; set another tp")
    return projection


def _split(projection: nn.Linear, mesh: DeviceMesh, dim: int) -> None:
    """Leave this process its part of a projection's outputs or inputs, and have it take and give plain tensors."""
    for linear, key, parameter, along in list(_parts(projection, dim)):
        placement = Replicate() if along is None else Shard(along)
        part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        own = part.clone()  # parts that torch makes may be views of the whole
        linear.register_parameter(key, nn.Parameter(own, parameter.requires_grad))
    if isinstance(projection, AdaptedLinear):
        projection.lora_up.register_forward_pre_hook(lambda _, inputs: (_to(inputs[0], Replicate()),))
    arriving, leaving = (Replicate(), Shard(-1)) if dim == _OUTPUTS else (Shard(-1), Replicate())
    projection.register_forward_pre_hook(lambda _, inputs: (_dealt(inputs[0], mesh, arriving),))
    projection.register_forward_hook(lambda _, __, output: _to(output, leaving).to_local())


def _parts(projection: nn.Module, dim: int) -> Iterator[tuple[nn.Module, str, nn.Parameter, int | None]]:
    """A projection's parameters, also its adapter's: whose each is, its name there, and along which dimension ranks
    have parts of it; None where all have the whole."""
    ends = (projection.lora_up, projection.lora_down) if isinstance(projection, AdaptedLinear) else (projection,) * 2
    for linear in projection.modules():
        for key, parameter in linear.named_parameters(recurse=False):
            shared = linear in (projection, ends[dim]) and dim < parameter.dim()
            yield linear, key, parameter, dim if shared else None


def _dealt(x: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [placement], run_check=False)


def _to(x: DTensor, placement: Placement) -> DTensor:
    """Also its gradients are dealt so."""
    return x.redistribute(placements=[placement], async_op=True)
