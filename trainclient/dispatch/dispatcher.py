"""Moves the rows of items from one arrangement to another, with gradients."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dataserver.planning import I64
from trainclient.dispatch.arrangement import Arrangement, integers, joined
from trainclient.exchange.all_to_all import exchanged
from trainclient.exchange.gathering import all_gather_rows
from trainclient.exchange.lost_ranks import translate_rank_errors
from trainclient.exchange.weak_group import WeakGroup


class Dispatcher:
    """One of several ranks that move items between each other. All call the same methods in the same order."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        """Move items between the ranks of a group, by default all.

        Raises:
            ValueError: there is no process group yet, or this process is no member of it.
        """
        found = group or (dist.group.WORLD if dist.is_initialized() else None)
        if found is None or found.rank() < 0:
            raise ValueError(
                "this process is in no process group to move items in; call torch.distributed.init_process_group, or "
                "give a group that it is a member of"
            )
        self._group = WeakGroup(found)

    def gather(self, numbers: Sequence[int] | Tensor, device: torch.device | str = "cpu") -> list[list[int]]:
        """What every rank has, such as the lengths of its items.

        Args:
            numbers: integers of this rank's items.
            device: where the group's tensors live: the GPU for NCCL.

        Raises:
            ValueError: something else than one integer for each item.
            RankLostError: another rank is gone.
            RuntimeError: the group was destroyed, and nobody else has it.
        """
        found = integers("this rank", numbers.tolist() if isinstance(numbers, Tensor) else numbers)
        with translate_rank_errors("other ranks"):
            rows = all_gather_rows(torch.from_numpy(found).to(device), self._group())
        return [row.tolist() for row in rows]

    def move(
        self,
        values: Tensor,
        rows: Sequence[Sequence[int]],
        *,
        source: Arrangement | None = None,
        to: Arrangement | None = None,
    ) -> Tensor:
        """Move the rows of all items, in one transfer; gradients take the same path back.

        Args:
            values: [n, ...], the rows of the items that this rank has, one item after the other.
            rows: for each rank the number of rows of each item that it sampled.
            source: where the items are; by default where they were sampled.
            to: where they go; by default to where they were sampled.

        Returns:
            [m, ...], the rows of the items that this rank gets, in the order of their numbers.

        Raises:
            ValueError: arrangements of other items, or another number of rows.
            RankLostError: another rank is gone.
            RuntimeError: the group was destroyed, and nobody else has it.
        """
        group = self._group()
        own, size = group.rank(), group.size()
        counts, sampled = joined(rows), Arrangement.as_sampled([len(found) for found in rows])
        start, end = source or sampled, to or sampled
        for found in (start, end):
            if not np.array_equal(found.home, sampled.home) or found.num_ranks != size:
                raise ValueError(
                    f"the arrangement is of {len(found.home)} items on {found.num_ranks} ranks, or otherwise sampled; "
                    f"rows are given for {len(counts)} items on {len(rows)} of {size} ranks"
                )
        here, there = start.of(own), end.of(own)
        if len(values) != counts[here].sum():
            raise ValueError(f"rank {own} has {len(values)} rows, but its items should have {counts[here].sum()}")
        leaving, arriving = end.rank[here], start.rank[there]
        sent = values[_grouped(counts[here], leaving).to(values.device)]
        to_each, of_each = (
            _totals(counts[items], ranks, end.num_ranks) for items, ranks in ((here, leaving), (there, arriving))
        )
        received = exchanged(sent, to_each, of_each, group)
        order: Tensor = torch.empty(len(received), dtype=torch.int64)
        order[_grouped(counts[there], arriving)] = torch.arange(len(received))
        found_rows: Tensor = received[order.to(values.device)]
        return found_rows


def _grouped(counts: I64, ranks: I64) -> Tensor:
    """The rows of items, sorted by rank and then as they are. int64 [rows]."""
    return torch.from_numpy(np.argsort(np.repeat(ranks, counts), kind="stable"))


def _totals(counts: I64, ranks: I64, num_ranks: int) -> list[int]:
    total = np.zeros(num_ranks, np.int64)
    np.add.at(total, ranks, counts)
    return [int(count) for count in total]
