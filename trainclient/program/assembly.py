"""Builds what a process runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dataserver.planning.job.spec import JobSpec
from trainclient.exchange.communicators import Communicators
from trainclient.exchange.gathered_features import GatheredFeatures
from trainclient.layouts.interface import ProcessSurroundings, chunk_ends_of
from trainclient.modules import Site, Target, TrainedModule
from trainclient.program.clock import Clock
from trainclient.program.interpreter import Interpreter
from trainclient.program.parameters import WHOLE_PARAMETERS, Parameters
from trainclient.program.runner import ChunkRunner, LossWeights
from trainclient.topology.process_grid import GridProcess, Topology


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """All that one process runs."""

    runners: tuple[ChunkRunner, ...]
    """Runners of its chunks, in the order of its program's modules."""
    interpreter: Interpreter

    @property
    def tensors(self) -> dict[str, tuple[str, ...]]:
        """Names of the tensors that are read from the views of each module."""
        found: dict[str, dict[str, None]] = {}
        for runner in self.runners:
            found.setdefault(runner.site.module.name, {}).update(dict.fromkeys(runner.module.tensors))
        return {module: tuple(names) for module, names in found.items()}

    def loss_sum(self, target: Target) -> Tensor:
        """Sum of this process's loss over its targets in the last step, without weight or denominator.

        A float64 scalar on its device.
        """
        found = torch.zeros_like(self.runners[0].loss_sum)
        return found + sum(runner.loss_sum for runner in self.runners if runner.module.target is target)


def assemble(
    spec: JobSpec,
    topology: Topology,
    process: GridProcess,
    modules: Sequence[tuple[Site, TrainedModule]],
    communicators: Communicators,
    weights: LossWeights,
    clock: Clock,
    observe: Callable[[GatheredFeatures], None] | None = None,
    parameters: Parameters = WHOLE_PARAMETERS,
) -> Machine:
    """What a process runs around its modules.

    Args:
        spec: the job.
        topology: of the job.
        process: which one this is.
        modules: of its chunks, in their order.
        communicators: how it reaches the other processes.
        weights: factors of the losses.
        clock: of this process.
        observe: gets the features of towers, if they are to be compared beyond their contrastive batches.
        parameters: of the chunks; by default of modules that hold no shares and sum no gradients.
    """
    surroundings = ProcessSurroundings(spec, topology, process, communicators, clock, observe)
    ends = chunk_ends_of(surroundings, [module for _, module in modules])
    runners = [
        ChunkRunner(
            site,
            module,
            own.receiver,
            own.sender,
            weights,
            clock,
            own.interaction,
            communicators.shared,
            buffers=own.buffers,
        )
        for (site, module), own in zip(modules, ends, strict=True)
    ]
    interpreter = Interpreter(spec.execution, topology, process, runners, clock, communicators.shared, parameters)
    return Machine(tuple(runners), interpreter)
