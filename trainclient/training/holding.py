"""What a process holds of its modules' parameters, all or a share; and how gradients become those of a step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainclient.modules import Site, TrainedModule
from trainclient.sharding.fsdp import ShardedNetwork, store_precisely
from trainclient.sharding.parts import dealt_over, like, local
from trainclient.sharding.tensor import split
from trainclient.topology.groups import Groups
from trainclient.training.config import Sharding
from trainclient.training.gradients import (
    BUCKET_BYTES,
    Gradients,
    reduce_gradients,
    scatter_gradients,
    square_sum,
)


class Holding(ABC):
    """The parameters of a process, by their names in the whole model."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
        """Hold parameters, of which those that are dealt to several processes are DTensors.

        Args:
            parameters: by their names in the whole model.
            mesh: of the processes that hold the same chunks.
        """
        self.parameters = parameters
        with torch.no_grad():
            self.held = {name: _part(parameter) for name, parameter in parameters.items()}
        """What this process stores of each parameter, and trains."""
        later = {dim for dim in mesh.mesh_dim_names or () if mesh.get_local_rank(dim) > 0}
        self._counted = {name for name, parameter in parameters.items() if later <= dealt_over(parameter)}
        """Of those that several processes have, the first one's count."""

    @abstractmethod
    def begin_step(self) -> None:
        """Make the modules ready to run; all ranks of a module do so together."""

    @abstractmethod
    def end_step(self) -> dict[str, Tensor]:
        """The step's gradients of what is held, summed over microbatches and ranks, in float32 or better."""

    @abstractmethod
    def drop(self) -> None:
        """Forget the gradients of the step."""

    def square_sum(self, gradients: Mapping[str, Tensor]) -> float:
        """This process's part of the squared norm of the step's gradients; those of all processes add up to it."""
        return float(square_sum(gradient for name, gradient in gradients.items() if name in self._counted))

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor that belongs to what is held of a parameter, as a part of the whole that a checkpoint has."""
        part = self.parameters[name]
        of_rows = tensor.dim() > 0  # the optimizer's count of steps is the same for all
        return like(part, tensor) if isinstance(part, DTensor) and of_rows else tensor


def hold(
    modules: Sequence[tuple[Site, TrainedModule]],
    shardings: Mapping[str, Sharding],
    groups: Groups,
    bucket_bytes: int = BUCKET_BYTES,
) -> Holding:
    """Hold modules as their shardings and their job say; all their processes do so together, before the first step.

    Args:
        modules: of this process.
        shardings: of the parameters of each, by name.
        groups: this process and the others.
        bucket_bytes: of gradients that are summed in one collective.

    Raises:
        ValueError: a module cannot be sharded, or split over tensor-parallel peers.
    """
    for site, module in modules:
        module.computes_in = module.dtype
        if shardings[site.module.name] is not Sharding.NONE:
            store_precisely(module.network)
        if groups.peers is not None:
            split(module.network, site.module.name, groups.mesh["tp"])
            if shardings[site.module.name] is Sharding.NONE:
                module.network.to(groups.device)
    held = [
        _hold([m for m in modules if shardings[m[0].module.name] is sharding], sharding, groups, bucket_bytes)
        for sharding in dict.fromkeys(shardings.values())
    ]
    return held[0] if len(held) == 1 else _Several(held, groups.mesh)


def _hold(
    modules: Sequence[tuple[Site, TrainedModule]], sharding: Sharding, groups: Groups, bucket_bytes: int
) -> Holding:
    mesh, by_hand = groups.mesh, sharding is Sharding.ZERO2
    if sharding is Sharding.NONE:
        return _Whole(modules, mesh, bucket_bytes)
    networks = [
        ShardedNetwork(m.network, site.module.name, mesh["dp"], m.dtype, groups.waits, by_hand=by_hand)
        for site, m in modules
    ]
    if by_hand:
        return _Gathered(networks, mesh, bucket_bytes)
    for (_, module), network in zip(modules, networks, strict=True):
        module.gather = network.gather_outermost
    return _Sharded(networks, mesh)


class _Several(Holding):
    """Modules that are held in several ways."""

    def __init__(self, parts: Sequence[Holding], mesh: DeviceMesh) -> None:
        super().__init__({name: p for part in parts for name, p in part.parameters.items()}, mesh)
        self._parts = parts

    def begin_step(self) -> None:
        for part in self._parts:
            part.begin_step()

    def end_step(self) -> dict[str, Tensor]:
        return {name: gradient for part in self._parts for name, gradient in part.end_step().items()}

    def drop(self) -> None:
        for part in self._parts:
            part.drop()


class _Whole(Holding):
    """All parameters are here, as on every other data-parallel rank of the module."""

    def __init__(self, modules: Sequence[tuple[Site, TrainedModule]], mesh: DeviceMesh, bucket_bytes: int) -> None:
        super().__init__(
            {f"{site.module.name}.{name}": p for site, m in modules for name, p in m.network.named_parameters()}, mesh
        )
        self._gradients = Gradients(self.parameters)
        self._group, self._bucket_bytes = mesh.get_group("dp"), bucket_bytes

    def begin_step(self) -> None:
        pass

    def end_step(self) -> dict[str, Tensor]:
        found = self._gradients.of_step()
        reduce_gradients(found.values(), self._group, self._bucket_bytes)
        return found

    def drop(self) -> None:
        self._gradients.drop()


class _Shares(Holding):
    """A share of every parameter is here."""

    def __init__(self, networks: Sequence[ShardedNetwork], mesh: DeviceMesh) -> None:
        super().__init__({f"{n.name}.{name}": shard for n in networks for name, shard in n.shards.items()}, mesh)
        self._networks = networks


class _Gathered(_Shares):
    """ZeRO-2: all parameters are here during a step, and gradients are summed into shares at its end."""

    def __init__(self, networks: Sequence[ShardedNetwork], mesh: DeviceMesh, bucket_bytes: int) -> None:
        super().__init__(networks, mesh)
        self._group, self._bucket_bytes = mesh.get_group("dp"), bucket_bytes
        self._gradients: Gradients | None = None

    def begin_step(self) -> None:
        for network in self._networks:
            network.gather()
        if self._gradients is None:  # FSDP makes whole parameters when it gathers first, and keeps them
            whole = {f"{n.name}.{name}": p for n in self._networks for name, p in n.network.named_parameters()}
            self._gradients = Gradients(whole)

    def end_step(self) -> dict[str, Tensor]:
        if self._gradients is None:
            raise RuntimeError("a step ended that had not begun")
        found = scatter_gradients(self._gradients.of_step(), self._group, self._bucket_bytes)
        self._gradients.drop()
        for network in self._networks:
            network.release()
        return found

    def drop(self) -> None:
        pass


class _Sharded(_Shares):
    """ZeRO-3: units gather their parameters for each pass, and sum their gradients into shares after each backward."""

    def begin_step(self) -> None:
        for network in self._networks:
            network.release()  # what the last pass gathered is of the step before

    def end_step(self) -> dict[str, Tensor]:
        for network in self._networks:
            network.release()  # what forwards without a backward have gathered
        return {
            name: torch.zeros_like(self.held[name]) if shard.grad is None else local(shard.grad)
            for name, shard in self.parameters.items()
            if shard.requires_grad
        }

    def drop(self) -> None:
        for shard in self.parameters.values():
            shard.grad = None


def _part(parameter: nn.Parameter) -> nn.Parameter:
    """What is here of a parameter, in the same memory."""
    return nn.Parameter(local(parameter), parameter.requires_grad) if isinstance(parameter, DTensor) else parameter
