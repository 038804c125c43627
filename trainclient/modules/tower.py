"""A tower, or a chunk of it, as a module of a job: images or texts in, features out."""

import torch

from dataserver.planning.jobspec import Modality
from trainclient.exchange.rows import Rows
from trainclient.models.contrastive import SCORES
from trainclient.models.towers import ImageTower, TextTower
from trainclient.modules.protocol import Features, Output, Target, TrainedModule, View
from trainclient.modules.work import forward_flops

_TENSORS = {
    Modality.IMAGE: ("patches", "grid", "cu_patches"),
    Modality.TEXT: ("token_ids", "position_ids", "cu_lengths"),
}
"""What the items hold, where it lies, and their offsets."""


class Tower(TrainedModule):
    """Runs some layers of a tower. The items of its rows are those of its view."""

    def __init__(self, stage: ImageTower | TextTower) -> None:
        super().__init__(stage)
        self._stage = stage
        self._is_text = isinstance(stage, TextTower)
        names = _TENSORS[Modality.TEXT if self._is_text else Modality.IMAGE]
        self.tensors = names if stage.is_first else names[1:]
        self.target = Target.PAIRS if stage.is_last else None

    def num_tokens(self, view: View) -> int:
        """See `TrainedModule`."""
        return self.num_rows(view) if self._is_text else 0

    def forward_flops(self, view: View) -> int:
        """See `TrainedModule`; without the features, and for texts without a head."""
        kind = "backbone" if self._is_text else "encoder"
        return forward_flops(kind, self._stage.config.size, view.tensors[self.tensors[-1]])

    def num_rows(self, view: View) -> int:
        """Patches or tokens."""
        return int(view.tensors[self.tensors[-1]][-1])

    def forward(self, view: View, rows: Rows | None) -> Output:
        """See `TrainedModule`."""
        *content, places, offsets = (view.tensors[name] for name in self.tensors)
        found = self._stage(content[0] if content else None, places, offsets, None if rows is None else rows.values)
        if found.features is not None:
            return Output(features=Features(found.features, SCORES[self._stage.config.loss], found.scale))
        return Output(Rows(found.hidden, torch.from_numpy(~view.items.invalid), offsets.to(torch.int64)))
