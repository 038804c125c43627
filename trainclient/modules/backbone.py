"""A backbone, or a chunk of it, as a module of a job: tokens and embeddings in, conditions and the text loss out."""

import torch
from torch import Tensor

from trainclient.exchange.rows import Rows
from trainclient.models.backbone import IGNORED_LABEL, BackboneBatch, BackboneStage, StageOutput
from trainclient.modules.protocol import Output, Target, TrainedModule, View
from trainclient.modules.work import forward_flops
from trainclient.sharding.sequence_parallel import SharedRows

_SHARED = ("cu_lengths",)
_FIRST = ("token_ids", "embedding_slots", "condition_slots")
_LAST = ("labels", "condition_slots")


class Backbone(TrainedModule):
    """Runs some layers of a decoder.

    Its first chunk takes embeddings, the others hidden states. The items of hidden states are samples, valid unless an
    image that they read is not: that is known, or encoders say it. The labels of the others are ignored, and so are the
    targets that their conditions are for.
    """

    def __init__(self, stage: BackboneStage) -> None:
        super().__init__(stage)
        self._stage = stage
        config = stage.config
        self._positions = "position_ids" if config.sections is None else "rotary_positions"
        own = (_FIRST if stage.is_first else ()) + (_LAST if stage.is_last else ())
        blocks = ("embedding_slots",) if config.two_way_images else ()
        self.tensors = tuple(dict.fromkeys((self._positions, *_SHARED, *own, *blocks)))
        self.target = Target.TEXT if stage.is_last else None

    def num_tokens(self, view: View) -> int:
        """Count the tokens of the view's sequences."""
        return int(view.tensors["cu_lengths"][-1])

    def forward_flops(self, view: View) -> int:
        """Count the operations of a forward over the view's sequences."""
        return forward_flops("backbone", self._stage.config.size, view.tensors["cu_lengths"])

    def num_rows(self, view: View) -> int:
        """Embeddings, none where another rank takes them for all that share the view; or its own tokens."""
        sequence_group = view.sequence_group
        if self._stage.is_first:
            return len(view.tensors["embedding_slots"]) if sequence_group is None or sequence_group.is_leader else 0
        tokens = self.num_tokens(view)
        return tokens if sequence_group is None else SharedRows(sequence_group, tokens).count

    def prepare(self, view: View) -> Tensor | None:
        """Return the embeddings of the text, unless this rank takes only a part of the view."""
        if not self._stage.is_first or view.sequence_group is not None:
            return None
        self.gather()
        return self._stage.embed_text(view.tensors["token_ids"])

    def forward(self, view: View, rows: Rows | None) -> Output:
        """Compute hidden states of the view's sequences, or in the last stage losses and conditions."""
        shared = None if view.sequence_group is None else SharedRows(view.sequence_group, self.num_tokens(view))
        first, values = self._stage.is_first, None if rows is None else rows.values
        valid = self._sample_validity(view, rows)
        if shared is not None and first and values is not None:
            valid, values = shared.told(valid), shared.deal(values, view.tensors["embedding_slots"])
        batch = self._batch(view, valid)
        output: StageOutput = self._stage(
            batch if shared is None else shared.batch(batch, self._stage.config.query_tokens),
            embeddings=values if first else None,
            hidden=None if first else values,
            text=view.prepared,
        )
        if output.hidden is not None:
            return Output(Rows(output.hidden, valid, view.tensors["cu_lengths"].to(torch.int64)))
        conditions = output.conditions
        if conditions is None:
            raise TypeError("the last chunk of a backbone returned neither hidden states nor conditions")
        whole = conditions if shared is None else shared.collect(conditions, batch.condition_slots)
        return Output(self._conditions(whole, view, valid), output.loss_sum)

    def _sample_validity(self, view: View, rows: Rows | None) -> Tensor:
        """bool [S]: True for samples whose images, as far as they are read, are known to be valid."""
        if rows is not None and not self._stage.is_first:
            return rows.valid
        slots, ends = view.tensors["embedding_slots"], view.tensors["cu_lengths"]
        sound, read = torch.from_numpy(~view.items.invalid), torch.searchsorted(slots, ends).diff() > 0
        valid = torch.where(read, torch.from_numpy(view.items.valid), sound)
        if rows is None or rows.offsets is None:
            return valid
        samples = _samples_of(slots[rows.offsets[:-1]], ends)
        valid[samples] = sound[samples]
        valid[samples[~rows.valid]] = False
        return valid

    def _batch(self, view: View, sample_valid: Tensor) -> BackboneBatch:
        tensors, labels = view.tensors, view.tensors.get("labels")
        if labels is not None:
            token_valid = sample_valid.repeat_interleave(tensors["cu_lengths"].diff())
            labels = labels.masked_fill(~token_valid, IGNORED_LABEL)
        return BackboneBatch(
            cu_lengths=tensors["cu_lengths"],
            position_ids=tensors[self._positions],
            token_ids=tensors.get("token_ids"),
            embedding_slots=tensors.get("embedding_slots"),
            condition_slots=tensors.get("condition_slots", torch.zeros(0, dtype=torch.int32)),
            labels=labels,
            image_blocks=_image_blocks(view) if self._stage.config.two_way_images else None,
        )

    def _conditions(self, conditions: Tensor, view: View, valid: Tensor) -> Rows:
        """Rows of as many items as there are generated images, each with the same number of query tokens."""
        queries = max(1, self._stage.config.query_tokens)
        offsets = torch.arange(0, len(conditions) + 1, queries)
        first = view.tensors["condition_slots"][offsets[:-1]]
        return Rows(conditions, valid[_samples_of(first, view.tensors["cu_lengths"])], offsets)


def _samples_of(slots: Tensor, ends: Tensor) -> Tensor:
    """int64 [k]: the samples of some tokens of a view."""
    return torch.searchsorted(ends, slots, right=True) - 1


def _image_blocks(view: View) -> Tensor:
    """int64 [T]: the image of each token of a view, -1 for text. No two images follow each other without text."""
    slots = view.tensors["embedding_slots"].to(torch.int64)
    blocks = torch.full((int(view.tensors["cu_lengths"][-1]),), -1)
    blocks[slots] = (slots.diff(prepend=slots[:1]) > 1).cumsum(0)
    return blocks
