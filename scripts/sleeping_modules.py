"""Modules that sleep the time that the planner expects of them, and compute nothing.

With them the trainer's executor, roles and messages can be timed on a machine with fewer cores than processes, where
models that compute would measure the machine.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from dataserver.planning.costs import backward_ns, forward_ns
from dataserver.planning.jobspec import ModuleKind, ModuleSpec
from trainclient.models.backbone import BackboneBatch, BackboneConfig, BackboneStage, StageOutput
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.generator import GeneratorConfig, ImageGenerator
from trainclient.parallel.topology import Place

WIDTH = 4
"""Of embeddings, hidden states and conditions: the narrowest that models accept."""


class Sleeper:
    """The times of one stage of a module."""

    def __init__(self, module: ModuleSpec, scale: int) -> None:
        """Sleep `scale` times as long as the module's cost says."""
        self._module = module
        self._scale = scale

    def run(self, sizes: Tensor, rows: int, anchor: Tensor, received: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sleep the forward time of a microbatch now, and its backward time in the backward pass.

        Args:
            sizes: integers [items], patches or tokens of each item of the microbatch.
            rows: of the output.
            anchor: parameter that makes the output differentiable where nothing was received.
            received: what the stage before has sent.

        Returns:
            Zeros [rows, WIDTH], and a loss of zero.
        """
        cost = self._module.cost
        items = forward_ns(cost, sizes.numpy().astype("int64"))
        forward = (cost.microbatch_ns + items.sum()) // self._module.pp
        seconds = (int(time_ns) * self._scale / 1e9 for time_ns in (forward, backward_ns(cost, forward)))
        output, loss = _Pass.apply(anchor, received, rows, *seconds)  # type: ignore[no-untyped-call]
        return output, loss


class _Pass(torch.autograd.Function):
    """Sleeps forward and backward; nobody reads the gradients, so there are none."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, received: Tensor | None, rows: int, forward_s: float, backward_s: float
    ) -> tuple[Tensor, Tensor]:
        """Sleep `forward_s`."""
        del received
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return anchor.new_zeros(rows, WIDTH), anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        """Sleep `backward_s`."""
        del gradients
        time.sleep(ctx.backward_s)
        return (None,) * 5


class SleepingEncoder(ImageEncoder):
    """An encoder that sleeps."""

    def __init__(self, sleeper: Sleeper, merge: int) -> None:
        super().__init__(EncoderConfig(0, WIDTH, 1, 1, patch=1, merge=merge, output_dim=WIDTH))
        self._sleeper = sleeper

    def forward(self, patches: Tensor, grid: Tensor, cu_patches: Tensor) -> Tensor:
        """As of `ImageEncoder`."""
        del grid
        rows = len(patches) // self.config.merge**2
        return self._sleeper.run(cu_patches.diff(), rows, self.patch_embed.weight)[0]


class SleepingStage(BackboneStage):
    """A stage of a backbone that sleeps."""

    def __init__(self, sleeper: Sleeper, stage: int, num_stages: int) -> None:
        super().__init__(BackboneConfig(num_stages, WIDTH, 1, 1, 1, 1e4, 1, 0), stage, num_stages)
        self._sleeper = sleeper
        self._anchor = nn.Parameter(torch.zeros(()))

    def forward(
        self, batch: BackboneBatch, *, hidden: Tensor | None = None, embeddings: Tensor | None = None
    ) -> StageOutput:
        """As of `BackboneStage`."""
        received = hidden if embeddings is None else embeddings
        rows = len(batch.condition_slots if self.is_last else batch.position_ids)
        output, loss = self._sleeper.run(batch.cu_lengths.diff(), rows, self._anchor, received)
        return StageOutput(None, output, loss) if self.is_last else StageOutput(output, None, None)


class SleepingGenerator(ImageGenerator):
    """A generator that sleeps."""

    def __init__(self, sleeper: Sleeper) -> None:
        super().__init__(GeneratorConfig(0, WIDTH, 1, 1, patch=1, merge=1, condition_dim=WIDTH))
        self._sleeper = sleeper

    def forward(
        self,
        patches: Tensor,
        grid: Tensor,
        cu_patches: Tensor,
        conditions: Tensor,
        condition_offsets: Tensor,
        noise: Tensor,
        time: Tensor,
        loss_mask: Tensor,
    ) -> Tensor:
        """As of `ImageGenerator`."""
        del patches, grid, condition_offsets, noise, time, loss_mask
        return self._sleeper.run(cu_patches.diff(), 0, self.output.weight, conditions)[1]


def sleeping_module(place: Place, merge: int, scale: int) -> nn.Module:
    """The module of a process, or its stage of it.

    Args:
        place: the process.
        merge: of the stream.
        scale: how many times as long as planned it sleeps.
    """
    sleeper = Sleeper(place.module, scale)
    if place.module.kind is ModuleKind.ENCODER:
        return SleepingEncoder(sleeper, merge)
    if place.module.kind is ModuleKind.GENERATOR:
        return SleepingGenerator(sleeper)
    return SleepingStage(sleeper, place.stage, place.module.pp)
