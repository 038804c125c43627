"""Sequence parallelism: ranks that share the rows of packed sequences, each with a run of them and a part of the heads.

As in DeepSpeed-Ulysses (arXiv 2309.14509), with sequences packed and groups of any degree (FlexSP, arXiv 2412.01523):
each rank computes everything but attention for its own rows. For attention all-to-alls hand it all rows of some of the
heads, queries while keys are computed and keys while values are, and another one brings its rows back.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainclient.exchange.view_groups import SequenceViewGroup
from trainclient.models.backbone import BackboneBatch
from trainclient.upload import upload


class SharedRows:
    """The rows of one microbatch, shared equally: this rank has a run of them."""

    def __init__(self, group: SequenceViewGroup, num_rows: int) -> None:
        """Share `num_rows` rows among the ranks of a group."""
        bounds = [num_rows * rank // group.size for rank in range(group.size + 1)]
        self.num_rows = num_rows
        self.own = slice(bounds[group.position], bounds[group.position + 1])
        """The rows that this rank computes."""
        self._group = group
        self._bounds = torch.tensor(bounds)
        self._lengths = self._bounds.diff().tolist()

    @property
    def count(self) -> int:
        """Number of this rank's rows."""
        return self.own.stop - self.own.start

    def to_heads(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to exchange this rank's rows of all heads for all rows of its own heads."""
        ranks, (here, heads, size) = self._group.size, rows.shape
        sent = rows.view(here, ranks, heads // ranks, size).transpose(0, 1).flatten(0, 1)
        return self._group.begin_all_to_all(sent, [here] * ranks, self._lengths, midway=True)

    def to_rows(self, mixed: Tensor) -> Tensor:
        """Exchange all rows of this rank's heads for its own rows of all heads."""
        ranks, here = self._group.size, self._lengths[self._group.position]
        found = self._group.begin_all_to_all(mixed, self._lengths, [here] * ranks, midway=True)()
        return found.view(ranks, here, *mixed.shape[1:]).transpose(0, 1).flatten(1, 2)

    def batch(self, whole: BackboneBatch, query_tokens: int) -> BackboneBatch:
        """What this rank computes of a batch; `query_tokens` as the backbone has them."""
        embeddings, conditions = self._mine(whole.embedding_slots), self._mine(whole.condition_slots)
        return BackboneBatch(
            cu_lengths=whole.cu_lengths,
            position_ids=whole.position_ids[..., self.own],
            token_ids=None if whole.token_ids is None else whole.token_ids[self.own],
            embedding_slots=None if whole.embedding_slots is None else self._moved(whole.embedding_slots[embeddings]),
            condition_slots=self._moved(whole.condition_slots[conditions]),
            labels=None if whole.labels is None else whole.labels[self.own],
            query_ids=conditions % max(1, query_tokens),
            sharing=self,
            image_blocks=whole.image_blocks,
        )

    def deal(self, values: Tensor, slots: Tensor) -> Tensor:
        """Hand what the first rank has to the ranks that have its rows.

        Args:
            values: [n, width] on the first rank, [0, width] on the others.
            slots: integers [n] on the CPU, the same on all: the row of each.

        Returns:
            [m, width], in the order of `slots`.
        """
        order, counts = self._by_rank(slots)
        mine = counts[self._group.position]
        arriving = [mine, *[0] * (self._group.size - 1)]
        if not self._group.is_leader:
            return self._group.begin_all_to_all(values, [0] * self._group.size, arriving)()
        dealt = values.index_select(0, upload(order, values.device))
        return self._group.begin_all_to_all(dealt, counts, arriving)()

    def collect(self, values: Tensor, slots: Tensor) -> Tensor:
        """Hand the first rank what all have: the reverse of `deal`."""
        order, counts = self._by_rank(slots)
        leaving = [len(values), *[0] * (self._group.size - 1)]
        if not self._group.is_leader:
            return self._group.begin_all_to_all(values, leaving, [0] * self._group.size)()
        back = upload(order.argsort(), values.device)
        return self._group.begin_all_to_all(values, leaving, counts)().index_select(0, back)

    def told(self, flags: Tensor) -> Tensor:
        """The first rank's flags, bool [n] on the CPU; all ranks have as many."""
        message = flags.to(torch.uint8)
        self._group.broadcast(message)
        return message.bool()

    def _by_rank(self, slots: Tensor) -> tuple[Tensor, Sequence[int]]:
        """Entries in the order of the ranks that have their rows, int64 [n], and how many each rank has."""
        ranks = torch.searchsorted(self._bounds[1:], slots.to(torch.int64), right=True)
        return ranks.argsort(stable=True), torch.bincount(ranks, minlength=self._group.size).tolist()

    def _mine(self, slots: Tensor | None) -> Tensor:
        """The entries whose rows this rank has, int64 [m]."""
        found = torch.zeros(0) if slots is None else slots
        return ((found >= self.own.start) & (found < self.own.stop)).nonzero().squeeze(1)

    def _moved(self, slots: Tensor) -> Tensor:
        """The same rows, counted from this rank's first."""
        return slots - self.own.start
