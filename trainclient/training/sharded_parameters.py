"""The parameters of a process, whole or sharded, and how gradients are reduced over its data-parallel ranks."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainclient.exchange.lost_ranks import translate_rank_errors
from trainclient.modules import Site, TrainedModule
from trainclient.sharding.dtensors import dealt_over, like, local
from trainclient.sharding.fsdp import ShardedNetwork, store_precisely
from trainclient.sharding.tensor_parallel import split
from trainclient.topology.process_groups import Groups
from trainclient.training.gradients import (
    BUCKET_BYTES,
    Gradients,
    reduce_gradients,
    scatter_gradients,
    square_sum,
)
from trainclient.training.model_config import Sharding


class Chunk(ABC):
    """The parameters of one chunk of a process, by their names in the whole model."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters

    @abstractmethod
    def unshard(self) -> None:
        """Make the chunk ready to run; all ranks that hold it do so together."""

    @abstractmethod
    def reduce(self) -> dict[str, Tensor]:
        """The step's gradients of the local parameters, summed over microbatches and ranks, in float32 or better."""

    @abstractmethod
    def drop(self) -> None:
        """Forget the gradients of the step, and what was gathered for it."""


class ShardedParameters:
    """The parameters of a process by their names in the whole model. See `Parameters`."""

    def __init__(self, chunks: Sequence[Chunk], mesh: DeviceMesh) -> None:
        """Collect the parameters of chunks; sharded ones are DTensors.

        Args:
            chunks: of the process, in their order.
            mesh: of the processes that hold the same chunks.
        """
        self._chunks = tuple(chunks)
        self.parameters = {name: parameter for chunk in chunks for name, parameter in chunk.parameters.items()}
        with torch.no_grad():
            self.local = {name: _part(parameter) for name, parameter in self.parameters.items()}
        """The part of each parameter that this process stores and trains."""
        later = {dim for dim in mesh.mesh_dim_names or () if mesh.get_local_rank(dim) > 0}
        self._counted = {name for name, parameter in self.parameters.items() if later <= dealt_over(parameter)}
        """Parameters whose squares this process counts: of replicas only the first."""
        self.gradients: dict[str, Tensor] = {}
        """The step's reduced gradients, by the names of their parameters."""

    def leave_to_others(self, names: Collection[str]) -> None:
        """Have other processes count the squares of parameters that they hold as well."""
        self._counted -= set(names)

    def unshard(self, chunk: int) -> None:
        """Gather the chunk's parameters from the ranks that share them."""
        with translate_rank_errors("other ranks"):
            self._chunks[chunk].unshard()

    def reduce(self, chunk: int) -> None:
        """Sum the chunk's gradients over the ranks that share them."""
        with translate_rank_errors("other ranks"):
            self.gradients |= self._chunks[chunk].reduce()

    def drop(self) -> None:
        """Forget the gradients of the step, and what was gathered for it."""
        self.gradients = {}
        for chunk in self._chunks:
            chunk.drop()

    def square_sum(self, device: torch.device) -> Tensor:
        """This process's part of the squared norm of the step's gradients, float64 scalar on its device; those of all
        processes add up to it."""
        return square_sum(g for name, g in self.gradients.items() if name in self._counted).to(device)

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor that belongs to the local part of a parameter, as its part of what a checkpoint stores."""
        part = self.parameters[name]
        of_rows = tensor.dim() > 0  # the optimizer's count of steps is the same for all
        return like(part, tensor) if isinstance(part, DTensor) and of_rows else tensor


def shard_parameters(
    modules: Sequence[tuple[Site, TrainedModule]],
    shardings: Mapping[str, Sharding],
    groups: Groups,
    bucket_bytes: int = BUCKET_BYTES,
) -> ShardedParameters:
    """Shard modules as the configuration and the job say; a collective, before the first step.

    Args:
        modules: of this process, in the order of its chunks.
        shardings: of the parameters of each, by name.
        groups: this process and the others.
        bucket_bytes: of gradients that are summed in one collective.

    Raises:
        ValueError: a module cannot be sharded, or split for tensor parallelism.
    """
    for site, module in modules:
        module.computes_in = module.dtype
        if shardings[site.module.name] is not Sharding.NONE:
            store_precisely(module.network)
        if groups.tp_group is not None:
            split(module.network, site.module.name, groups.mesh["tp"])
            if shardings[site.module.name] is Sharding.NONE:
                module.network.to(groups.device)
    chunks = [_hold(site, module, shardings[site.module.name], groups, bucket_bytes) for site, module in modules]
    return ShardedParameters(chunks, groups.mesh)


def _hold(site: Site, module: TrainedModule, sharding: Sharding, groups: Groups, bucket_bytes: int) -> Chunk:
    name, by_hand, group = site.module.name, sharding is Sharding.ZERO2, groups.mesh.get_group("dp")
    if sharding is Sharding.NONE:
        return _Whole(module.network, name, group, bucket_bytes)
    network = ShardedNetwork(module.network, name, groups.mesh["dp"], module.dtype, groups.waits, by_hand=by_hand)
    if by_hand:
        return _Gathered(network, group, bucket_bytes)
    module.gather = network.gather_outermost
    return _Sharded(network)


class _Whole(Chunk):
    """Every data-parallel rank has all parameters."""

    def __init__(self, network: nn.Module, name: str, group: ProcessGroup, bucket_bytes: int) -> None:
        super().__init__({f"{name}.{key}": parameter for key, parameter in network.named_parameters()})
        self._gradients = Gradients(self.parameters)
        self._group, self._bucket_bytes = group, bucket_bytes

    def unshard(self) -> None:
        pass

    def reduce(self) -> dict[str, Tensor]:
        found = self._gradients.of_step()
        reduce_gradients(found.values(), self._group, self._bucket_bytes)
        return found

    def drop(self) -> None:
        self._gradients.drop()


class _Shares(Chunk):
    """Every data-parallel rank has a shard of each parameter."""

    def __init__(self, network: ShardedNetwork) -> None:
        super().__init__({f"{network.name}.{name}": shard for name, shard in network.shards.items()})
        self._network = network


class _Gathered(_Shares):
    """ZeRO-2: parameters are gathered for a step, and gradients are reduced into shards at its end."""

    def __init__(self, network: ShardedNetwork, group: ProcessGroup, bucket_bytes: int) -> None:
        super().__init__(network)
        self._group, self._bucket_bytes = group, bucket_bytes
        self._gradients: Gradients | None = None
        self._is_here = False

    def unshard(self) -> None:
        if self._is_here:  # for an evaluation since the last step, or the step of it before this one
            return
        self._network.gather()
        self._is_here = True
        if self._gradients is None:  # FSDP makes whole parameters when it gathers first, and keeps them
            whole = {f"{self._network.name}.{name}": p for name, p in self._network.network.named_parameters()}
            self._gradients = Gradients(whole)

    def reduce(self) -> dict[str, Tensor]:
        if self._gradients is None:
            raise RuntimeError("gradients are summed of a chunk that was never gathered")
        found = scatter_gradients(self._gradients.of_step(), self._group, self._bucket_bytes)
        self._gradients.drop()
        self._release()
        return found

    def drop(self) -> None:
        self._release()

    def _release(self) -> None:
        self._network.release()
        self._is_here = False


class _Sharded(_Shares):
    """ZeRO-3: each block gathers its parameters for each pass, and reduces its gradients after each backward."""

    def unshard(self) -> None:
        self._network.release()  # what the last pass gathered is of the step before

    def reduce(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(local(shard)) if shard.grad is None else local(shard.grad)
            for name, shard in self.parameters.items()
            if shard.requires_grad
        }

    def drop(self) -> None:
        self._network.release()  # what forwards without a backward have gathered
        for shard in self.parameters.values():
            shard.grad = None


def _part(parameter: nn.Parameter) -> nn.Parameter:
    """The local part of a parameter, in the same memory."""
    return nn.Parameter(local(parameter), parameter.requires_grad) if isinstance(parameter, DTensor) else parameter
