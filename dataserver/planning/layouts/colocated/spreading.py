"""How the items of a module are spread over batches, one for each rank, and over the microbatches of each."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.balancing import (
    BALANCERS,
    Balancer,
    BinBudget,
    BinBudgetError,
    bin_loads,
    bin_totals,
    check,
    in_runs,
)
from dataserver.planning.job.fields import BalancePolicy, ModuleSpec
from dataserver.planning.layouts.colocated.budgets import StepBudgetError
from dataserver.planning.layouts.colocated.items import ModuleItems
from dataserver.planning.stream.packing import number_by_first


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the k items of a module are. int64 [k] each."""

    batch: I64
    """There is one for each rank; which rank takes which comes later (`assignment.assign_batches`)."""
    microbatch: I64
    """Position among the microbatches of the batch."""


def spread_items(items: ModuleItems, num_sequences: int, microbatches: int) -> tuple[Spread, I64]:
    """Spread the items of a module by the balancer that it names, or as in the sampling layout.

    That layout deals out the sequences in their order and leaves every image on the rank of its sequence. It is what
    the policy `none` asks for, and what replaces a policy that turns out slower; `even` deals out images like
    sequences. Items that are padded are put into microbatches first, by runs of least possible maximum or of equal
    count, and these are spread like items.

    Returns:
        The spread; and int64 [ranks], forward nanoseconds of each rank in that order.

    Raises:
        StepBudgetError: what a rank may keep does not hold the items, in however many microbatches.
        BinBudgetError: the memory of so many microbatches does not hold the items, or no way to fit them was found.
    """
    home = _home(items, num_sequences)
    with _naming(items.module):
        spread, at_home = (_spread_padded if items.module.padded else _spread)(items, home, microbatches)
    return spread, microbatches * items.module.cost.microbatch_ns + at_home


def check_alone(items: ModuleItems) -> None:
    """Refuse items of one sequence that ranks cannot keep at once, in however many microbatches.

    Raises:
        BinBudgetError: no way to fit them was found.
    """
    home, count = _home(items, 1), len(items.index)
    if items.module.padded:
        _spread_padded(items, home, count)
    else:
        _batches(items, home, bin_loads(items.loads, home, items.module.dp), count)


def spread_beside(items: ModuleItems, backbone: Spread, microbatches: int) -> Spread:
    """Spread images to the batch of their sequence.

    Raises:
        BinBudgetError: the memory of so many microbatches does not hold them, or no way to fit them was found.
    """
    batch, count = backbone.batch[items.sequence], items.module.dp * microbatches
    with _naming(items.module):
        microbatch = _microbatch(items, batch, microbatches)
        if not fits(items.sizes, batch * microbatches + microbatch, count, items.budget(), padded=items.module.padded):
            raise BinBudgetError("the images beside their sequences exceed its memory")
    return Spread(batch, microbatch)


def _home(items: ModuleItems, num_sequences: int) -> I64:
    """The batch of each item in the sampling layout, int64 [k]."""
    if items.module.balance is BalancePolicy.EVEN:
        return in_runs(len(items.index), items.module.dp)
    home: I64 = in_runs(num_sequences, items.module.dp)[items.sequence]
    return home


@contextmanager
def _naming(module: ModuleSpec) -> Iterator[None]:
    """Errors say whose memory is too small."""
    try:
        yield
    except StepBudgetError as error:
        raise StepBudgetError(f"module {module.name}: {error}", module.name) from error
    except BinBudgetError as error:
        raise BinBudgetError(f"module {module.name}: {error}") from error


def _spread(items: ModuleItems, home: I64, microbatches: int) -> tuple[Spread, I64]:
    """By the module's policy, or by `home`, int64 [k], where that is faster and fits the memory."""
    at_home = bin_loads(items.loads, home, items.module.dp)
    try:
        batch = _batches(items, home, at_home, microbatches)
    except BinBudgetError as error:
        budget, step = items.budget(microbatches), items.step_budget(items.sizes)
        if budget is not None and step is not None and budget.cap == step.cap:
            raise StepBudgetError(str(error), items.module.name) from error
        raise
    return Spread(batch, _microbatch(items, batch, microbatches)), at_home


def _batches(items: ModuleItems, home: I64, at_home: I64, microbatches: int) -> I64:
    """The batch of each item, int64 [k]."""
    ranks, policy, budget = items.module.dp, items.module.balance, items.budget(microbatches)
    keeps = fits(items.sizes, home, ranks, budget, padded=False)
    if policy.keeps_order:
        if not keeps:
            raise BinBudgetError("the items of a rank in canonical order exceed its memory")
        return home
    capacity = None if items.slots is None else items.slots * microbatches
    planned = BALANCERS[policy.value](items.loads, ranks, capacity, budget)
    slower = at_home.max() < bin_loads(items.loads, planned, ranks).max()
    return home if keeps and slower else planned


def _spread_padded(items: ModuleItems, home: I64, microbatches: int) -> tuple[Spread, I64]:
    """Items to microbatches of all ranks, and these to batches: the fastest way of those that fit the memory."""
    module, ranks, count = items.module, items.module.dp, items.module.dp * microbatches
    canonical = home * microbatches + _split(items, home, microbatches, runs)
    ways: list[tuple[I64, Balancer]] = [(canonical, runs)]
    if not module.balance.keeps_order:
        even, policy = np.empty_like(canonical), BALANCERS[module.balance.value]
        even[np.argsort(-items.loads, kind="stable")] = in_runs(len(even), count)
        ways = [(BALANCERS["padded"](items.loads, count, items.slots, items.budget()), policy), (even, policy), *ways]
    found, lacking = [], BinBudgetError("its microbatches in canonical order exceed its memory")
    for microbatch, balancer in ways:
        if fits(items.sizes, microbatch, count, items.budget(), padded=True):
            times, held = (bin_totals(v, microbatch, count, padded=True) for v in (items.loads, items.sizes))
            try:
                batch = balancer(times, ranks, microbatches, items.step_budget(held))
            except BinBudgetError:  # another way may need less padding
                lacking = StepBudgetError("its microbatches exceed what a rank holds of a step", module.name)
            else:
                found.append((int(bin_loads(times, batch, ranks).max()), microbatch, batch))
    if not found:
        raise lacking
    _, microbatch, batch = min(found, key=lambda way: way[0])
    number = np.empty(count, np.int64)  # every batch has as many microbatches
    number[np.argsort(batch, kind="stable")] = np.arange(count) % microbatches
    at_home = bin_totals(items.loads, canonical, count, padded=True).reshape(ranks, -1).sum(axis=1)
    return Spread(batch[microbatch], number[microbatch]), at_home


def _microbatch(items: ModuleItems, batch: I64, microbatches: int) -> I64:
    policy = items.module.balance
    balancer: Balancer = runs if policy.keeps_order else BALANCERS[policy.value]
    return _split(items, batch, microbatches, balancer, items.slots, items.budget())


def _split(
    items: ModuleItems,
    batch: I64,
    microbatches: int,
    balancer: Balancer,
    slots: int | None = None,
    budget: BinBudget | None = None,
) -> I64:
    """The microbatch of each item within its batch, int64 [k], numbered in the order of their first items.

    In a phase that runs alone it makes no rank faster how its items are divided, since nobody waits for a microbatch.
    It decides what the rank has to hold at once: at most `slots` items and what has `budget`.
    """
    found, order = np.zeros_like(batch), np.argsort(batch, kind="stable")
    for mine in np.split(order, np.searchsorted(batch[order], np.arange(1, items.module.dp))):
        yield_point()
        here = None if budget is None else BinBudget(budget.need[mine], budget.cap)
        found[mine] = number_by_first(balancer(items.loads[mine], microbatches, slots, here))
    return found


def runs(loads: I64, num_bins: int, capacity: int | None = None, budget: BinBudget | None = None) -> I64:
    """The baseline as a `Balancer`: items in their order, dealt out in runs.

    Raises:
        BinBudgetError: a bin has too little room for its run.
        ValueError: there are too many items.
    """
    check(loads, num_bins, capacity, budget)
    bins = in_runs(len(loads), num_bins)
    if budget is not None and not fits(budget.need, bins, num_bins, budget, padded=False):
        raise BinBudgetError(f"{len(loads)} items in canonical order exceed the memory of {num_bins} bins")
    return bins


def fits(needs: I64, place: I64, count: int, budget: BinBudget | None, *, padded: bool) -> bool:
    """Whether every one of `count` places has room, `place` int64 [k] being that of each item."""
    return budget is None or int(bin_totals(needs, place, count, padded=padded).max()) <= budget.cap
