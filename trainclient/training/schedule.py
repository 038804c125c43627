"""Learning rates of each module. They depend on nothing but the step, so that a resumed run has the same."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import nn

from dataserver.planning.job.fields import ModuleSpec
from trainclient.exchange.message_header import Kind
from trainclient.modules import rows_of
from trainclient.training.config import ConfigError
from trainclient.training.optimizer_config import Course, GroupOptions, OptimizerConfig

PROJECTOR: Final = ".projector"
"""What follows the name of a module whose projector has rates of its own."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The factor of all learning rates by the step: 1 through warm-up and stable steps, then down to `min_ratio`."""

    course: Course
    begin: int
    """First step of the decay."""
    steps: int
    """How long it takes; the first of these updates still has factor 1, the one after the last `min_ratio`."""
    min_ratio: float

    @classmethod
    def of(cls, config: OptimizerConfig) -> "Schedule":
        """The schedule that a configuration asks for."""
        begin = config.warmup_steps + (config.stable_steps or 0)
        return cls(config.schedule, begin, config.decay_steps or 1, config.min_ratio)

    def factor(self, step: int) -> float:
        """The factor of the learning rates for update number `step` of the job, which counts from 0.

        Cosine is that of arXiv 1608.03983 without restarts; wsd falls as 1 - sqrt, the best of the forms compared in
        arXiv 2405.18392.
        """
        if self.course is Course.CONSTANT:
            return 1.0
        progress = min(1.0, max(0.0, (step - self.begin) / self.steps))
        left = {
            Course.LINEAR: 1 - progress,
            Course.COSINE: (1 + math.cos(math.pi * progress)) / 2,
            Course.WSD: 1 - math.sqrt(progress),
        }[self.course]
        return self.min_ratio + (1 - self.min_ratio) * left


@dataclass(frozen=True, slots=True)
class ModuleRates:
    """The learning rate and weight decay of one module's parameters."""

    peak: float
    """Learning rate after the warm-up."""
    warmup_steps: int
    weight_decay: float
    """Weight decay of the module's matrices."""
    schedule: Schedule
    """Learning rate schedule of all modules."""

    def lr(self, step: int) -> float:
        """The learning rate of update number `step` of the job, which counts from 0."""
        rise = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return self.peak * rise * self.schedule.factor(step)


def module_rates(config: OptimizerConfig, modules: Sequence[ModuleSpec]) -> dict[str, ModuleRates]:
    """The rates of every module of a job by its name: as all have them, as its kind, as itself.

    Those of projectors have the name of their module with `PROJECTOR` behind; none, where they are as of the module.

    Raises:
        ConfigError: options for modules that the job does not have.
    """
    of_kind = config.of_kinds
    names = [m.name for m in modules]
    unknown = sorted(set(config.modules) - set(names))
    if unknown:
        raise ConfigError(f"optimizer.modules names {unknown}, which are not in the job; it has {names}")
    kinds = {str(m.kind) for m in modules}
    for kind, options in of_kind.items():
        if kind not in kinds and options != GroupOptions():
            raise ConfigError(f"optimizer.{kind} is given, but the job has no {kind}; its modules are {names}")
    none = GroupOptions()
    own = {m.name: config.modules.get(m.name, none).over(of_kind.get(str(m.kind), none)) for m in modules}
    if config.projector != none:
        projecting = [m.name for m in modules if rows_of(m) is Kind.EMBEDDINGS and not m.frozen]
        if not projecting:
            raise ConfigError(f"optimizer.projector is given, but no module trains one; the job's modules are {names}")
        own |= {name + PROJECTOR: config.projector.over(own[name]) for name in projecting}
    return {name: _rates(config, options) for name, options in own.items()}


def _rates(config: OptimizerConfig, own: GroupOptions) -> ModuleRates:
    return ModuleRates(
        peak=own.lr if own.lr is not None else config.lr * (own.lr_factor if own.lr_factor is not None else 1.0),
        warmup_steps=config.warmup_steps if own.warmup_steps is None else own.warmup_steps,
        weight_decay=config.weight_decay if own.weight_decay is None else own.weight_decay,
        schedule=Schedule.of(config),
    )


def parameter_rates(rates: Mapping[str, ModuleRates], module: str, network: nn.Module) -> dict[str, ModuleRates]:
    """The rates of each parameter of a network, by its name in the whole model.

    Args:
        rates: of `module_rates`.
        module: the name of its module.
        network: whose parameters they are; `projecting` says which ones project.

    Raises:
        ConfigError: projectors have rates of their own, and nothing says which parameters are the network's.
    """
    projecting: tuple[str, ...] = ()
    if module + PROJECTOR in rates:
        said: tuple[str, ...] | None = getattr(network, "projecting", None)
        if said is None:
            raise ConfigError(
                f"optimizer.projector is given, and nothing says which parameters of module {module} project: give "
                f"{type(network).__name__} an attribute `projecting`, a tuple of what their names begin with (empty if "
                "none does), or leave optimizer.projector out"
            )
        projecting = tuple(said)
    names = (name for name, _ in network.named_parameters())
    return {f"{module}.{n}": rates[module + PROJECTOR if n.startswith(projecting) else module] for n in names}
