"""A network whose parameters are dealt to the ranks of a data-parallel group, by torch's FSDP2 (`fully_shard`).

Each rank stores a share of the rows (dim 0) of every parameter, in float32 or better unless it is frozen, and computes
with all rows in the type of the run. The elements of the network's lists (`nn.ModuleList`, `nn.ModuleDict`) are units,
each gathered by one collective; whatever is outside of them is one more. Names of parameters stay.
"""

from collections import deque

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard
from torch.distributed.tensor import DTensor

from trainclient.exchange.wait_times import Waits
from trainclient.models.parameters import units
from trainclient.sharding.fsdp_waits import note_waits
from trainclient.torch_compat import find_tensors_in_dataclasses, reduce_unused_parameters

MAX_GATHERS = 2
"""Units on their way while the next one is begun."""


class ShardedNetwork:
    """A network whose parameters are sharded."""

    def __init__(
        self, network: nn.Module, name: str, mesh: DeviceMesh, dtype: torch.dtype, waits: Waits, *, by_hand: bool
    ):
        """Shard a network, in place; all ranks of the group do so together.

        Args:
            network: whole, or split for tensor parallelism, with its values, the same on all ranks; on any device.
            name: of its module, for errors.
            mesh: the data-parallel ranks. The shares move to their device.
            dtype: in which it computes.
            waits: notes what units wait for in the middle of their passes.
            by_hand: whether `gather` and `release` alone move parameters, and nothing sums gradients. Otherwise each
                unit gathers itself for its passes, and sums its gradients into shares after each backward pass.

        Raises:
            ValueError: it has a parameter without dimensions, or units that are shared or cannot be called.
        """
        self.network = network
        self.name = name
        whole = dict(network.named_parameters())
        scalars = [key for key, parameter in whole.items() if parameter.dim() == 0]
        if scalars:
            raise ValueError(
                f"module {name} has parameters without dimensions ({', '.join(scalars)}): ranks cannot hold "
                "shares; give them the shape [1], or leave its sharding at none"
            )
        if isinstance(network, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"the network of module {name} is a {type(network).__name__}, which cannot be called, and so not be "
                "sharded; put it into a module with a forward, or leave its sharding at none"
            )
        self._units = [_shard(unit, mesh, dtype, by_hand) for unit in (*units(network), network)][::-1]
        for unit in () if by_hand else self._units:
            note_waits(unit, mesh.device_type, waits)
        for module in (*units(network), network):
            find_tensors_in_dataclasses(module)
        self.shards: dict[str, nn.Parameter] = {
            key: _sharded(parameter) for key, parameter in network.named_parameters()
        }
        """Every parameter by its name, with the shape of the whole; their local tensors are what is stored here."""

    def gather(self) -> None:
        """Have the current values of all parameters here, in the network's type; all ranks do so together."""
        on_their_way: deque[UnshardHandle] = deque()
        for unit in self._units:
            unit.reshard()  # what an evaluation gathered may be of an earlier step
            handle = unit.unshard(async_op=True)
            if handle is not None:
                on_their_way.append(handle)
            if len(on_their_way) > MAX_GATHERS:
                on_their_way.popleft().wait()
        for handle in on_their_way:
            handle.wait()

    def gather_outermost(self) -> None:
        """Have the parameters here that are outside of lists, before a pass that gathers for itself; all ranks do."""
        self._units[0].unshard()

    def release(self) -> None:
        """Free whole parameters and keep the shares."""
        for unit in self._units:
            unit.reshard()


def store_precisely(network: nn.Module) -> None:
    """Store what is trained of a network in float32 or better."""
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def _shard(unit: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, by_hand: bool) -> FSDPModule:
    """Shard what is not yet sharded of a unit."""
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    for stored in {p.dtype for p in unit.parameters() if p.requires_grad and p.dtype != dtype}:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=stored, cast_forward_inputs=False)
    sharded = fully_shard(unit, mesh=mesh, reshard_after_forward=False if by_hand else None, mp_policy=policy)
    # Losses are divided by planned counts, so gradients are summed. Each call is for this unit alone, not for those
    # within it; and the plain sum is the one that every backend has.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    sharded.set_requires_gradient_sync(not by_hand, recurse=False)
    sharded.set_reshard_after_backward(not by_hand, recurse=False)
    # A microbatch may leave parameters out of one rank's graph and not of another's.
    reduce_unused_parameters(sharded)
    return sharded


def _sharded(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        raise TypeError(f"FSDP left a {type(parameter).__name__} of shape {list(parameter.shape)} whole")
    return parameter
