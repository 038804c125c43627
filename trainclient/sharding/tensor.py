"""Tensor parallelism: peers that share the matrices of a network's layers, and compute the same rows together.

As in Megatron-LM (arXiv 1909.08053, section 3), by torch's DTensor: of the first projections of a layer each peer has
some of the columns of the result, of the last one the rows that take them, and what comes out is summed. So a layer
costs one sum over the peers forward, and one backward. Everything else is whole on all peers, and the same.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trainclient.models.layers import SplitLayer


def split(network: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Leave this process its part of a network, in place; all peers do so together.

    Args:
        network: whole, with its values, the same on all peers; on any device.
        name: of its module, for errors.
        mesh: the peers. What is split moves to their device.

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
        for projection in (*layer.columns, *layer.rows):
            _require_parts(f"{name}.{path}.{projection}", layer.get_submodule(projection), mesh.size(), layer.rows)
        styles = {**{p: ColwiseParallel() for p in layer.columns}, **{p: RowwiseParallel() for p in layer.rows}}
        parallelize_module(layer, mesh, styles, src_data_rank=None)
        for projection in (*layer.columns, *layer.rows):
            _own_memory(layer.get_submodule(projection))
        layer.register_forward_pre_hook(partial(_alike, mesh))


def _alike(mesh: DeviceMesh, _layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs of a layer as tensors that are the same on all peers: so their gradients are summed over the peers
    once for the layer, not once for each projection."""
    return tuple(
        DTensor.from_local(x, mesh, [Replicate()], run_check=False) if isinstance(x, Tensor) else x for x in inputs
    )


def _require_parts(path: str, projection: nn.Module, peers: int, rows: tuple[str, ...]) -> None:
    if not isinstance(projection, nn.Linear):
        raise ValueError(f"{path} is a {type(projection).__name__}; a Linear is required, or tp 1")
    by_rows = path.rpartition(".")[2] in rows
    size, what = (projection.in_features, "inputs") if by_rows else (projection.out_features, "outputs")
    if size % peers:
        raise ValueError(f"{path} has {size} {what} to split, which is no multiple of tp {peers}; set another tp")


def _own_memory(projection: nn.Module) -> None:
    """Keep this process's parts alone: those that torch makes may be views of the whole."""
    for key, parameter in list(projection.named_parameters()):
        setattr(projection, key, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
