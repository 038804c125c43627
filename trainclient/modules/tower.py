"""A tower, or a chunk of it, as a module of a job: images or texts in, features out."""

import torch

from trainclient.exchange.rows import Rows
from trainclient.models.contrastive import SCORES
from trainclient.models.towers import TowerStage
from trainclient.modules.protocol import Features, Output, Target, TrainedModule, View
from trainclient.modules.work import forward_flops


class _Tower(TrainedModule):
    """Runs some layers of a tower. The items of its rows are those of its view."""

    reads: tuple[str, ...]
    """What the items hold, where it lies, and their offsets."""
    costs_as: str
    """The kind of module whose blocks it has."""

    def __init__(self, stage: TowerStage) -> None:
        super().__init__(stage)
        self._stage = stage
        self.tensors = self.reads if stage.is_first else self.reads[1:]
        self.target = Target.PAIRS if stage.is_last else None

    def forward_flops(self, view: View) -> int:
        """Count the operations of a forward, without the features, and for texts without a head."""
        return forward_flops(self.costs_as, self._stage.config.size, view.tensors[self.tensors[-1]])

    def num_rows(self, view: View) -> int:
        """Number of patches or tokens."""
        return int(view.tensors[self.tensors[-1]][-1])

    def forward(self, view: View, rows: Rows | None) -> Output:
        """Compute features of the view's samples, or rows for the next stage."""
        *content, positions, offsets = (view.tensors[name] for name in self.tensors)
        found = self._stage(content[0] if content else None, positions, offsets, None if rows is None else rows.values)
        if found.features is not None:
            return Output(features=Features(found.features, SCORES[self._stage.config.loss], found.scale))
        return Output(Rows(found.hidden, torch.from_numpy(~view.items.invalid), offsets.to(torch.int64)))


class TowerOfImages(_Tower):
    """A tower that reads patches of images."""

    reads = ("patches", "grid", "cu_patches")
    costs_as = "encoder"


class TowerOfTexts(_Tower):
    """A tower that reads tokens of texts."""

    reads = ("token_ids", "position_ids", "cu_lengths")
    costs_as = "backbone"

    def num_tokens(self, view: View) -> int:
        """Count the tokens of the view's texts."""
        return self.num_rows(view)
