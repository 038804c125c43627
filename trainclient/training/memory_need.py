"""What modules of a job take of a device, from the sizes that the trainer gives them: the `memory` of the job."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from torch import nn

from dataserver.planning.job.fields import ModuleSpec
from trainclient.models.parameters import units
from trainclient.modules import family_of
from trainclient.orchestrate.memory import (
    PRECISIONS,
    Parameters,
    Precision,
    block_bytes,
    gathered_at_once,
    logit_bytes,
    saved_bytes,
)
from trainclient.sharding.tensor_parallel import tensor_parallel_parameters
from trainclient.topology.process_grid import GridProcess, Topology
from trainclient.training.config import ConfigError
from trainclient.training.model_config import Sharding
from trainclient.training.models import Models


@dataclass(frozen=True, slots=True)
class Need:
    """What a module takes of the fullest of its devices."""

    module: str
    parameters: int
    """Number of parameters of the whole module."""
    state_bytes: int
    """Weights, gradients and the optimizer's states."""
    budget_bytes: int
    """What is left for rows of microbatches between forward and backward, as the job's field of that name."""
    unit_bytes: int | None
    """What a row of these takes; None of modules of the user's own, which nothing is known of."""


@dataclass(frozen=True, slots=True)
class State:
    """The parameters of a module, and what they take of the fullest of its devices."""

    module: ModuleSpec
    parameters: int | None
    """Number of parameters of the whole module; None of modules of the user's own, which nothing is known of before
    they are made."""
    trained: int
    """Those of them that are trained: of a module with adapters, theirs."""
    state_bytes: int | None
    """Weights, gradients and the optimizer's states."""


def states(models: Models, topology: Topology) -> list[State]:
    """The parameters of each module of a job; nothing is allocated.

    Args:
        models: of the run.
        topology: of its processes.
    """
    stages = [process for process in topology.processes if process.rank == 0 and process.is_leader]
    return [_state(models, module, stages) for module in models.job.execution.modules]


def _state(models: Models, module: ModuleSpec, stages: Sequence[GridProcess]) -> State:
    if module.name not in models.sizes:
        return State(module, None, 0, None)
    precision, parameters, most = PRECISIONS[models.config.dtype], Parameters(), 0.0
    for process in stages:
        networks = [models.shaped(chunk)[1].network for chunk in process.chunks if chunk.module == module]
        if networks:
            parameters += sum((_parameters(network, set(), 1) for network in networks), Parameters())
            most = max(most, _state_bytes(models, module, networks, precision))
    return State(module, int(parameters.trained + parameters.frozen), int(parameters.trained), ceil(most))


def needs(models: Models, topology: Topology, memory_bytes: int) -> list[Need]:
    """What each module of a job takes.

    Args:
        models: of the run.
        topology: of its processes.
        memory_bytes: of a device, as far as modules may use it.

    Raises:
        ConfigError: modules share devices, or one does not fit its own.
    """
    stages = [process for process in topology.processes if process.rank == 0 and process.is_leader]
    if any(len(process.modules) > 1 for process in stages):
        raise ConfigError(
            "the modules of this job share devices, and how they divide memory depends on the sizes of samples; "
            "`trainclient orchestrate` does that"
        )
    modules = models.job.execution.modules
    return [_need(models, m, [p for p in stages if p.modules == (m,)], topology, memory_bytes) for m in modules]


def as_yaml(found: Sequence[Need]) -> str:
    """The modules of a job with their `memory`, and what it follows from as comments."""
    lines = ["modules:"]
    for need in found:
        lines.append(f"# {need.parameters:,} parameters; {need.state_bytes:,} bytes of a device for them")
        lines.append(f"- name: {need.module}")
        if need.unit_bytes is None:
            lines.append(f"# {need.budget_bytes:,} bytes are left; what rows take of them, only its author knows")
        else:
            lines.append(f"  memory: {{budget_bytes: {need.budget_bytes}, unit_bytes: {need.unit_bytes}}}")
    return "\n".join(lines) + "\n"


def _need(
    models: Models, module: ModuleSpec, stages: Sequence[GridProcess], topology: Topology, memory_bytes: int
) -> Need:
    found = [_Stage.of(models, module, process) for process in stages]
    state = ceil(max(stage.state_bytes for stage in found))
    free = memory_bytes - ceil(max(stage.state_bytes + stage.logit_bytes for stage in found))
    unit = max(stage.unit_bytes for stage in found)
    work = max(stage.work_bytes for stage in found)
    room = free * unit / (unit + work) if work else free  # all of it may be one microbatch
    if found[0].longest is not None and not topology.changing_groups:
        room = max(room, free - found[0].longest * work)
    if room < max(1, unit):
        raise ConfigError(
            f"module {module.name} takes {(memory_bytes - free) / 1e9:.4f} GB of each of its devices for weights, "
            f"gradients, the optimizer and logits, and of {memory_bytes / 1e9:.4f} too little is left to compute a "
            "microbatch; raise its tp, its pp, or its dp with sharding, or --memory-gb"
        )
    return Need(module.name, sum(stage.count for stage in found), state, int(room), ceil(unit) or None)


@dataclass(frozen=True, slots=True)
class _Stage:
    """What one stage of a module takes of a device."""

    count: int
    """Parameters of the whole stage, over all tensor-parallel ranks."""
    state_bytes: float
    unit_bytes: float = 0
    work_bytes: float = 0
    """What computing a row takes besides."""
    logit_bytes: float = 0
    """What the loss takes besides, whatever a microbatch holds."""
    longest: int | None = None
    """Rows of the longest microbatch, where the job says; of groups, of all its ranks together."""

    @classmethod
    def of(cls, models: Models, module: ModuleSpec, process: GridProcess) -> "_Stage":
        """The stage that a process has a part of."""
        precision = PRECISIONS[models.config.dtype]
        made = [models.shaped(chunk)[1] for chunk in process.chunks]
        networks = [module.network for module in made]
        count = sum(p.numel() for network in networks for p in network.parameters())
        states = _state_bytes(models, module, networks, precision)
        if module.name not in models.sizes:
            return cls(count, states)
        size, kind = models.sizes[module.name].size, family_of(module).block
        again, shares = bool(module.recompute), module.sp  # a row is on one of those that share its sequence
        block = block_bytes(kind, size, module.tp, precision) / shares
        kept = saved_bytes(kind, size, module.tp, again, precision) / shares
        share = sum(1 for network in networks for _ in units(network)) / size.layers
        longest = models.job.execution.microbatch * models.job.stream.seq_len if size.vocab_size else None
        return cls(
            count,
            states,
            kept * share if module.runs_backward and made[0].passes_gradients else block,
            block if again else 0,
            logit_bytes(size.vocab_size, ceil((longest or 0) / shares), precision) if process.chunks[-1].is_last else 0,
            longest,
        )


def _state_bytes(models: Models, module: ModuleSpec, networks: Sequence[nn.Module], precision: Precision) -> float:
    """Weights, gradients and the optimizer's states of a stage's chunks on one device."""
    blocks = [unit for network in networks for unit in units(network)]
    shared = {p for network in networks for p in tensor_parallel_parameters(network)} if module.tp > 1 else set()
    whole = sum((_parameters(network, shared, module.tp) for network in networks), Parameters())
    sharding = models.sharding(module)
    if sharding is not Sharding.ZERO3:
        return whole.state_bytes(module.replicas if sharding is Sharding.ZERO2 else 1, precision)
    of_blocks = sum((_parameters(block, shared, module.tp) for block in blocks), Parameters())
    gathered = gathered_at_once(of_blocks, max(1, len(blocks)), whole + of_blocks * -1)
    return whole.dealt_bytes(module.replicas, gathered, precision)


def _parameters(network: nn.Module, shared: set[nn.Parameter], tp: int) -> Parameters:
    """The parameters of a network that one tensor-parallel rank has."""
    found = Parameters()
    for parameter in network.parameters():
        number = parameter.numel() / (tp if parameter in shared else 1)
        found += Parameters(trained=number) if parameter.requires_grad else Parameters(frozen=number)
    return found
