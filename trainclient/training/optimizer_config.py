"""Configuration of the optimizer: AdamW, the learning rate's course, and what single modules have of their own."""

from enum import StrEnum
from typing import Annotated

import tyro
from pydantic import Field

from trainclient.training.config_base import SAYS_ITSELF, Options


class Course(StrEnum):
    """The learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"


Factor = Annotated[Annotated[float, Field(gt=0)] | None, SAYS_ITSELF]
Decay = Annotated[Annotated[float, Field(ge=0)] | None, SAYS_ITSELF]
Steps = Annotated[Annotated[int, Field(ge=0)] | None, SAYS_ITSELF]
DecaySteps = Annotated[Annotated[int, Field(ge=1)] | None, SAYS_ITSELF]


class GroupOptions(Options):
    """What modules of a kind, or one module, have of their own; what is not given is as for all."""

    lr: Factor = None
    """Learning rate, instead of optimizer.lr."""
    lr_factor: Factor = None
    """Multiple of optimizer.lr, instead of a rate."""
    weight_decay: Decay = None
    """Weight decay, instead of optimizer.weight-decay."""
    warmup_steps: Steps = None
    """Warm-up steps, instead of optimizer.warmup-steps. The decay begins for all modules at once."""

    def problems(self) -> list[str]:
        """What does not fit together, each beginning with the field."""
        if self.lr is not None and self.lr_factor is not None:
            return [f"lr_factor: {self.lr_factor:g} is given beside lr {self.lr:g}; give one of them"]
        return []

    def over(self, less: "GroupOptions") -> "GroupOptions":
        """These options, and those of `less` where none are given. A rate or a factor replaces either."""
        given = self.model_dump(exclude_none=True)
        below = less.model_dump(exclude_none=True)
        if given.keys() & {"lr", "lr_factor"}:
            below = {key: value for key, value in below.items() if key not in ("lr", "lr_factor")}
        return GroupOptions(**(below | given))


class OptimizerConfig(Options):
    """AdamW; the learning rate rises in a warm-up, stays, and falls, by the step alone."""

    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Learning rate after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises from lr / warmup_steps to lr."""
    schedule: Course = Course.CONSTANT
    """Learning rate after the warm-up: constant, linear, cosine, or wsd, which holds it for stable-steps and then
    lowers it as 1 - sqrt."""
    stable_steps: Steps = None
    """Only with wsd, which needs it: steps after the warm-up before the learning rate falls."""
    decay_steps: DecaySteps = None
    """Steps over which the learning rate falls; needed by all schedules but constant."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate after the decay, as a share of lr."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the mean of the gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the mean of the squared gradients."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the mean square."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the gradients of all modules together; 0 does not clip."""
    encoder: GroupOptions = GroupOptions()
    """Settings of encoders that differ from those above."""
    backbone: GroupOptions = GroupOptions()
    """Settings of the backbone that differ from those above."""
    generator: GroupOptions = GroupOptions()
    """Settings of generators that differ from those above."""
    projector: GroupOptions = GroupOptions()
    """Settings that differ for the projectors of encoders, which turn features into rows of the backbone."""
    modules: Annotated[dict[str, GroupOptions], tyro.conf.Suppress] = Field(default_factory=dict)
    """By name, what single modules have of their own; only in a configuration file."""

    @property
    def of_kinds(self) -> dict[str, GroupOptions]:
        """What modules of a kind have of their own."""
        return {"encoder": self.encoder, "backbone": self.backbone, "generator": self.generator}

    def problems(self) -> list[str]:
        """What does not fit together, each beginning with the field."""
        own = (
            self.of_kinds
            | {"projector": self.projector}
            | {f"modules.{name}": options for name, options in self.modules.items()}
        )
        found = [f"{name}.{problem}" for name, options in own.items() for problem in options.problems()]
        decays, waits = self.schedule is not Course.CONSTANT, self.schedule is Course.WSD
        if decays and self.decay_steps is None:
            found.append(f"decay_steps: schedule {self.schedule} needs the steps in which the learning rate falls")
        if waits and self.stable_steps is None:
            found.append("stable_steps: schedule wsd needs the steps between warm-up and decay")
        unused = {"decay_steps": not decays, "min_ratio": not decays, "stable_steps": not waits}
        found += [
            f"{name}: schedule {self.schedule} has none; leave it out, or give optimizer.schedule another value"
            for name, is_unused in unused.items()
            if is_unused and getattr(self, name)
        ]
        return found
