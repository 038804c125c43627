"""Modules that sleep the time that the planner expects of them, and compute nothing.

With them the trainer's interpreter, exchange and messages can be timed on a machine with fewer cores than processes,
where models that compute would measure the machine.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from dataserver.planning.costs.model import backward_ns, forward_ns
from dataserver.planning.job.fields import Modality
from dataserver.planning.layouts.grouped.options import GroupedOptions
from trainclient.client import Batch
from trainclient.exchange.view_groups import SequenceViewGroup
from trainclient.models.contrastive import SiglipRows
from trainclient.models.video_encoder import groups_of
from trainclient.modules import Features, Output, Rows, Site, Target, TrainedModule, View

WIDTH = 4
"""Width of embeddings, hidden states and conditions."""


class _Pass(torch.autograd.Function):
    """Sleeps forward and backward; nobody reads the gradients, so there are none."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, received: Tensor | None, rows: int, forward_s: float, backward_s: float
    ) -> tuple[Tensor, Tensor]:
        """Sleep as long as the forward takes."""
        del received
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return anchor.new_zeros(rows, WIDTH), anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        """Sleep as long as the backward takes."""
        del gradients
        time.sleep(ctx.backward_s)
        return (None,) * 5


class Sleeping(TrainedModule):
    """A chunk of a module that takes its time and gives zeros.

    It knows the sizes in its view alone, so it also proves that these lead to the planned times.
    """

    def __init__(self, site: Site, scale: int) -> None:
        """Sleep `scale` times as long as the module's cost says."""
        super().__init__(nn.Linear(1, 1))
        self._site = site
        self._scale = scale

    def run(
        self,
        sizes: Tensor,
        rows: int,
        received: Rows | None = None,
        sequence_group: SequenceViewGroup | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sleep the forward time of a microbatch now, and its backward time in the backward pass.

        Args:
            sizes: integers [items], patches or tokens of each item of the microbatch.
            rows: of the output.
            received: what arrived.
            sharers: with whom this rank shares the items, if with anyone.

        Returns:
            Zeros [rows, WIDTH], and a loss of zero.
        """
        cost = self._site.module.cost
        items = forward_ns(cost, sizes.numpy().astype("int64")).sum()
        if sequence_group is not None and self._site.module.sp == 1:  # else the cost is that of a share
            items = (items + self._exchange_ns(int(sizes.sum()), sequence_group.size)) // sequence_group.size
        forward = (cost.microbatch_ns + items) // self._site.num_chunks
        seconds = (int(time_ns) * self._scale / 1e9 for time_ns in (forward, backward_ns(cost, forward)))
        anchor, values = self.network.weight, None if received is None else received.values
        output, loss = _Pass.apply(anchor, values, rows, *seconds)  # type: ignore[no-untyped-call]
        return output, loss

    def _exchange_ns(self, tokens: int, degree: int) -> int:
        """What a forward exchanges in a group of that degree, times the degree."""
        found = self._site.job.execution.options(GroupedOptions).exchange
        unit_ps = next(e.unit_ps for e in found if e.degree == degree)
        return tokens * unit_ps // (10 * (100 + self._site.module.cost.backward_percent))


class SleepingEncoder(Sleeping):
    """An encoder of images that sleeps."""

    tensors: tuple[str, ...] = ("cu_patches",)

    def forward(self, view: View, rows: Rows | None) -> Output:
        """Sleep, and return zeros as embeddings."""
        offsets = self.offsets(view).to(torch.int64)
        values, _ = self.run(self.sizes(view), int(offsets[-1]), rows)
        return Output(Rows(values, torch.from_numpy(view.items.valid), offsets))

    def sizes(self, view: View) -> Tensor:
        """Return the size of what attends to itself alone: patches of each image."""
        return view.tensors["cu_patches"].diff()

    def offsets(self, view: View) -> Tensor:
        """The first embedding of each item, and the total."""
        return view.tensors["cu_patches"] // self._site.job.stream.sizing.merge**2


class SleepingEncoderOfAudio(SleepingEncoder):
    """An encoder of clips that sleeps."""

    tensors = ("cu_positions", "cu_rows")

    def sizes(self, view: View) -> Tensor:
        """Return the positions of each clip."""
        return view.tensors["cu_positions"].diff()

    def offsets(self, view: View) -> Tensor:
        """Return the first embedding of each clip, and the total."""
        return view.tensors["cu_rows"]


class SleepingEncoderOfVideos(SleepingEncoder):
    """An encoder of videos that sleeps."""

    tensors = ("cu_patches", "grid")

    def sizes(self, view: View) -> Tensor:
        """Patches of each group of frames."""
        return groups_of(view.tensors["grid"])[1].diff()


class SleepingBackbone(Sleeping):
    """A chunk of a backbone that sleeps."""

    tensors = ("cu_lengths", "embedding_slots", "condition_slots")
    target = Target.TEXT

    def num_rows(self, view: View) -> int:
        """Embeddings, or tokens; a share stands for all."""
        if self._site.chunk:
            return int(view.tensors["cu_lengths"][-1])
        if view.sequence_group is not None and not view.sequence_group.is_leader:
            return 0
        return len(view.tensors["embedding_slots"])

    def forward(self, view: View, rows: Rows | None) -> Output:
        """Sleep, and return zeros as hidden states or conditions."""
        cu_lengths, slots = view.tensors["cu_lengths"], view.tensors["condition_slots"]
        if view.sequence_group is not None and not view.sequence_group.is_leader:
            slots = slots[:0]
        is_last = self._site.chunk == self._site.num_chunks - 1
        values, loss = self.run(
            cu_lengths.diff(), len(slots) if is_last else int(cu_lengths[-1]), rows, view.sequence_group
        )
        if not is_last:
            return Output(Rows(values, torch.ones(len(view.items), dtype=torch.bool), cu_lengths.to(torch.int64)))
        offsets = torch.arange(0, len(slots) + 1, max(1, self._site.job.stream.generation.query_tokens))
        return Output(Rows(values, torch.ones(len(offsets) - 1, dtype=torch.bool), offsets), loss)


class SleepingGenerator(Sleeping):
    """A generator of images that sleeps."""

    tensors = ("cu_patches", "condition_offsets")
    target = Target.IMAGE

    def num_rows(self, view: View) -> int:
        """Conditions of all target images."""
        return int(view.tensors["condition_offsets"][-1])

    def forward(self, view: View, rows: Rows | None) -> Output:
        """Sleep, and return a loss of zero."""
        return Output(loss_sum=self.run(view.tensors["cu_patches"].diff(), 0, rows)[1])


class SleepingTower(Sleeping):
    """A chunk of a tower that sleeps."""

    target = Target.PAIRS

    def __init__(self, site: Site, scale: int) -> None:
        super().__init__(site, scale)
        self.tensors = ("cu_lengths",) if site.module.modality is Modality.TEXT else ("cu_patches",)

    def num_rows(self, view: View) -> int:
        """Count the patches or tokens of a view."""
        return int(view.tensors[self.tensors[0]][-1])

    def forward(self, view: View, rows: Rows | None) -> Output:
        """Sleep, and return zeros as features or rows."""
        offsets = view.tensors[self.tensors[0]]
        is_last = self._site.chunk == self._site.num_chunks - 1
        values, _ = self.run(offsets.diff(), len(offsets) - 1 if is_last else int(offsets[-1]), rows)
        if is_last:
            return Output(features=Features(values, SiglipRows))
        return Output(Rows(values, torch.ones(len(view.items), dtype=torch.bool), offsets.to(torch.int64)))


class Listed:
    """Microbatches that are all there, as the interpreter reads them."""

    ready = True

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = iter(batches)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)


_ENCODERS: Mapping[Modality, Callable[[Site, int], TrainedModule]] = {
    Modality.IMAGE: SleepingEncoder,
    Modality.AUDIO: SleepingEncoderOfAudio,
    Modality.VIDEO: SleepingEncoderOfVideos,
}
_SLEEPING: Mapping[str, Callable[[Site, int], TrainedModule]] = {
    "encoder": lambda site, scale: _ENCODERS[site.module.reads](site, scale),
    "backbone": SleepingBackbone,
    "generator": SleepingGenerator,
    "tower": SleepingTower,
}


def sleeping_module(site: Site, scale: int) -> TrainedModule:
    """The module of a place that sleeps `scale` times as long as planned."""
    return _SLEEPING[site.module.kind](site, scale)
