"""Contrastive batches as barriers: items are balanced inside their batch only."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.balancing import (
    Balancer,
    BinBudget,
    bin_totals,
    in_runs,
    longest_first,
    padded,
    searched,
)


@dataclass(frozen=True, slots=True)
class BatchedArrangement:
    """Where each of n items of a step goes in one tower."""

    rank: I64
    """int64 [n]: data-parallel rank of each item."""
    microbatch: I64
    """int64 [n]: number within the step; each contrastive batch has consecutive ones, in the order of the batches."""


def contrastive_batches(num_items: int, size: int) -> I64:
    """The batch of each item: runs of `size` items in canonical order. int64 [num_items].

    Raises:
        ValueError: the items do not divide into whole batches.
    """
    if size < 1 or num_items % size:
        raise ValueError(
            f"{num_items} items do not divide into contrastive batches of {size}; a smaller batch would have fewer "
            "negatives, so use a multiple"
        )
    return np.arange(num_items, dtype=np.int64) // size


def balance_batches(
    loads: I64,
    batch: I64,
    num_ranks: int,
    microbatches_per_batch: int,
    balancer: Balancer = searched,
    budget: BinBudget | None = None,
) -> BatchedArrangement:
    """Spread the items of every batch over ranks, and those of each rank over the batch's microbatches.

    No item leaves its batch: another batch would give it other negatives (DISTMM, section 4.1). In a batch all ranks
    and microbatches hold equal counts. Each tower calls this with its own loads and ranks.

    Args:
        loads: int64 [n]: cost of each item in this tower.
        batch: int64 [n]: batch of each item, 0, 1, ... without gaps; the items of each divide evenly.
        num_ranks: data-parallel ranks of the tower.
        microbatches_per_batch: K of section 4.3.
        balancer: see `balancing.BALANCERS`.
        budget: need of each item, and what a rank has for its items of one batch: it holds them all at the barrier.

    Raises:
        BinBudgetError: no way was found to stay within the memory.
    """
    rank, microbatch = np.zeros(len(loads), np.int64), np.zeros(len(loads), np.int64)
    for number, mine in enumerate(_members(batch)):
        here = None if budget is None else BinBudget(budget.need[mine], budget.cap)
        rank[mine] = balancer(loads[mine], num_ranks, len(mine) // num_ranks, here)
        for r in range(num_ranks):
            yield_point()
            part = mine[rank[mine] == r]
            within = balancer(loads[part], microbatches_per_batch, len(part) // microbatches_per_batch)
            microbatch[part] = number * microbatches_per_batch + within
    return BatchedArrangement(rank, microbatch)


def batches_in_order(loads: I64, batch: I64, num_ranks: int, microbatches_per_batch: int) -> BatchedArrangement:
    """The baseline: the items of every batch in their order, dealt out in runs to rank by rank.

    Arguments and errors are those of `balance_batches`.
    """
    rank, microbatch = np.zeros(len(loads), np.int64), np.zeros(len(loads), np.int64)
    for number, mine in enumerate(_members(batch)):
        rank[mine], within = np.divmod(in_runs(len(mine), num_ranks * microbatches_per_batch), microbatches_per_batch)
        microbatch[mine] = number * microbatches_per_batch + within
    return BatchedArrangement(rank, microbatch)


def pad_batches(
    loads: I64, batch: I64, num_ranks: int, microbatches_per_batch: int, budget: BinBudget | None = None
) -> BatchedArrangement:
    """`balance_batches` for towers whose items are padded to the largest of their microbatch.

    The items of a batch, sorted, are cut into microbatches of equal counts, which makes the sum of their largest items
    as small as can be; these are spread over ranks, longest first. Loads are those of `costs.forward_ns`.

    Arguments and errors are those of `balance_batches`; a microbatch needs count x largest need of memory.
    """
    rank, microbatch = np.zeros(len(loads), np.int64), np.zeros(len(loads), np.int64)
    for number, mine in enumerate(_members(batch)):
        count = num_ranks * microbatches_per_batch
        part = padded(loads[mine], count, len(mine) // count)
        times = bin_totals(loads[mine], part, count, padded=True)
        held = (
            None if budget is None else BinBudget(bin_totals(budget.need[mine], part, count, padded=True), budget.cap)
        )
        rank_of = longest_first(times, num_ranks, microbatches_per_batch, held)
        order = np.argsort(rank_of, kind="stable")
        within = np.empty(count, np.int64)
        within[order] = np.arange(count) % microbatches_per_batch
        rank[mine], microbatch[mine] = rank_of[part], number * microbatches_per_batch + within[part]
    return BatchedArrangement(rank, microbatch)


def deal_by_size(
    sizes: I64, batch: I64, num_ranks: int, microbatches_per_batch: int, padded: bool
) -> BatchedArrangement:
    """The items of every batch, largest first, dealt out to the ranks in turn; padded ones a whole microbatch at once.

    What the fullest rank holds then follows from the sizes alone and grows with each of them (`barrier_units`).

    Arguments and errors are those of `balance_batches`.
    """
    rank, microbatch = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
    for number, mine in enumerate(_members(batch)):
        together = len(mine) // (num_ranks * microbatches_per_batch) if padded else 1
        turn, rank_of = np.divmod(np.arange(len(mine)) // together, num_ranks)
        ordered = mine[np.argsort(-sizes[mine], kind="stable")]
        rank[ordered] = rank_of
        microbatch[ordered] = number * microbatches_per_batch + turn % microbatches_per_batch
    return BatchedArrangement(rank, microbatch)


def barrier_units(
    sizes: I64, num_ranks: int, microbatches_per_batch: int, padded: bool = False, in_order: bool = False
) -> int:
    """What the fullest rank holds at the barrier at most, padding included, whatever the order of the samples.

    Under `deal_by_size` exactly the most, or, with `in_order`, under `batches_in_order`. A batch whose items are each
    at most as large as those given needs no more.

    Args:
        sizes: int64 [batches, items]: patches or tokens of the items of each batch, which divide evenly.
        num_ranks: data-parallel ranks of the tower.
        microbatches_per_batch: K of section 4.3.
        padded: whether the items of a microbatch are padded to its largest.
        in_order: whether items are dealt out in canonical order, so that one rank may have all of the largest.
    """
    count = sizes.shape[1] // num_ranks
    together = count // microbatches_per_batch if padded else 1
    apart = 1 if in_order else num_ranks * together
    ordered = -np.sort(-sizes, axis=1)
    return together * int(ordered[:, : apart * (count // together) : apart].sum(axis=1).max(initial=0))


def _members(batch: I64) -> Iterator[I64]:
    """The items of each batch, in the order of the batches."""
    for number in range(int(batch.max(initial=-1)) + 1):
        yield_point()
        yield np.flatnonzero(batch == number)
