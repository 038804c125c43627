"""A step in rounds: as few as the memory of what encoders keep until their backward phase holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.balancing import BALANCERS, BinBudgetError, bin_loads
from dataserver.planning.job.fields import PackingPolicy
from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.colocated.arranging import ArrangedRound, arrange
from dataserver.planning.layouts.colocated.budgets import StepBudgetError, check_sequences, check_total
from dataserver.planning.layouts.colocated.items import ModuleItems, module_items
from dataserver.planning.layouts.colocated.splitting import Pack, pack_for_rounds, split_sequences
from dataserver.planning.layouts.shared.sequences import pack_step
from dataserver.planning.plan.limits import check_microbatches
from dataserver.planning.stream.packing import number_by_first
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.sizing import MicrobatchTooLargeError

_SHARE = 1 << 32
"""Parts in which the memory of a module is counted, so that those of several modules add up."""


@dataclass(frozen=True, slots=True)
class StepRounds:
    """The items of a step by rounds, each with all phases of its own, and where they go."""

    sequence: I64
    """int64 [n]: the sequence of each sample, numbered from 0."""
    size: int
    """Microbatches of each rank in a round."""
    items: Sequence[tuple[ModuleItems, ...]]
    """The items of each round; `ModuleItems.sequence` counts the sequences of the round from 0."""
    arranged: Sequence[ArrangedRound]
    """Where the items of each round go."""
    asked_by: Sequence[str] = ()
    """Modules that fewer rounds are known to be too few for."""
    split_sequences: bool = False
    """Whether sequences, as packed, had more images than a round holds."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each rank in the step."""
        return self.size * len(self.items)

    def rearranged(self, execution: Execution, edit: Callable[[ModuleItems], ModuleItems]) -> "StepRounds":
        """The same rounds with other places; BinBudgetError where the memory of a module does not hold that."""
        edited = [tuple(edit(i) for i in of_round) for of_round in self.items]
        return replace(self, items=edited, arranged=[arrange(execution, i, self.size) for i in edited])

    def places(self, module: str) -> tuple[I64, I64, I64]:
        """Index, rank and microbatch of each of a module's items, by index. int64 [k] each."""
        found = []
        for number, (items, arranged) in enumerate(zip(self.items, self.arranged, strict=True)):
            (own,) = (i for i in items if i.module.name == module)
            rank, microbatch = arranged.places(module)
            found.append((own.index, rank, number * self.size + microbatch))
        index, rank, microbatch = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = np.argsort(index, kind="stable")
        return index[order], rank[order], microbatch[order]


def arrange_step(job: Job, samples: StepSamples, at_least: int = 0) -> tuple[StepRounds, int]:
    """Arrange the items of a step in the fewest rounds, and then the fewest microbatches, that memory holds.

    Each rank has at least `at_least` microbatches.

    From 16 rounds, as from 16 microbatches, what is tried next is an eighth more. Sequences that no round holds are
    taken apart where nothing else helps.

    Returns:
        The rounds; and the microbatches of each rank that hold the sequences.

    Raises:
        BinBudgetError: no way was found to fit the memory of a module, however many rounds and microbatches.
    """
    try:
        return _in_fewest_rounds(job, samples, partial(pack_step, job, samples), at_least)
    except (BinBudgetError, MicrobatchTooLargeError):
        packed, _ = pack_step(job, samples)
        if np.array_equal(packed, split_sequences(job.spec, samples, packed)):
            raise
        rounds, fewest = _in_fewest_rounds(job, samples, pack_for_rounds(job, samples), at_least)
        return replace(rounds, split_sequences=True), fewest


def _in_fewest_rounds(job: Job, samples: StepSamples, pack: Pack, at_least: int) -> tuple[StepRounds, int]:
    sequence, fewest = pack(at_least)
    items = module_items(job.spec, samples, sequence)
    if not (job.stream.packing.enabled and job.spec.execution.backbone.packing is PackingPolicy.BALANCED):
        for own in items:  # more rounds have the same sequences
            check_sequences(own)
    alone = [_fewest_rounds(i) for i in items]
    rounds, most = max(alone), 1
    asked_by = [i.module.name for i, number in zip(items, alone, strict=True) if number == rounds and _bounds_step(i)]
    if any(_bounds_step(i) for i in items):
        most = max(1, len(samples))
    while True:
        try:
            found = _in_rounds(job, samples, pack, (sequence, fewest), rounds, last=rounds >= most)
            return replace(found, asked_by=asked_by), fewest
        except BinBudgetError as error:
            if rounds >= most:
                raise
            if isinstance(error, StepBudgetError):
                asked_by = [error.module]
            rounds = min(most, rounds + max(1, rounds // 8))


def _in_rounds(
    job: Job, samples: StepSamples, pack: Pack, packed: tuple[I64, int], rounds: int, *, last: bool
) -> StepRounds:
    """The step in so many rounds of the fewest microbatches; BinBudgetError if no number of them fits.

    `packed` are the sequences and microbatches of `pack`; with the `last` number of rounds only microbatches help.
    """
    execution, (sequence, fewest) = job.spec.execution, packed
    items = module_items(job.spec, samples, sequence)
    if rounds == 1:
        for whole in items:
            check_total(whole, 1)
    size = -(-max(fewest, *(_fewest_microbatches(i) for i in items)) // rounds)
    while True:
        yield_point()
        check_microbatches(job.spec, rounds * size)
        if rounds * size > fewest:  # there are more slots to pack into
            sequence, needed = pack(rounds * size)
            size = -(-needed // rounds)
            items = module_items(job.spec, samples, sequence)
        found = _cut(items, rounds, size)
        try:
            return StepRounds(sequence, size, found, [arrange(execution, of_round, size) for of_round in found])
        except StepBudgetError:
            # Rounds help sooner than microbatches: more of these pack a whole step otherwise, and may so make it fit.
            if (rounds > 1 and not last) or _is_spread_out(found, size):
                raise
        except BinBudgetError:
            if _is_spread_out(found, size):
                raise
        size += max(1, size // 8)


def _is_spread_out(rounds: Sequence[tuple[ModuleItems, ...]], size: int) -> bool:
    """Whether every item had a microbatch for itself."""
    return size > max(len(i.index) for of_round in rounds for i in of_round)


def _bounds_step(items: ModuleItems) -> bool:
    return items.step_budget(items.sizes) is not None


def _fewest_rounds(items: ModuleItems) -> int:
    """In fewer rounds all ranks together cannot keep the items."""
    budget = items.step_budget(items.sizes)
    return 1 if budget is None else max(1, -(-int(items.sizes.sum()) // (items.module.dp * budget.cap)))


def _fewest_microbatches(items: ModuleItems) -> int:
    """With fewer microbatches of each rank the memory of a module cannot hold its items."""
    budget = items.budget()
    return 1 if budget is None else -(-int(items.sizes.sum()) // (items.module.dp * budget.cap))


def _cut(items: tuple[ModuleItems, ...], rounds: int, size: int) -> list[tuple[ModuleItems, ...]]:
    """The items of each round: sequences with their images, so that what is kept is as even as can be.

    Raises:
        StepBudgetError: all ranks together cannot keep those of a round.
    """
    if rounds == 1:
        return [items]
    backbone = next(i for i in items if i.module.holds_samples)
    count, kept = len(backbone.index), np.zeros(len(backbone.index), np.int64)
    for own in items:
        budget = own.step_budget(own.sizes)
        if budget is not None:
            kept += bin_loads(own.sizes, own.sequence, count) * _SHARE // (own.module.dp * budget.cap)
    capacity = backbone.module.dp * size * (backbone.slots or 1)
    of_sequence = number_by_first(BALANCERS["lpt"](kept, rounds, capacity))
    found = list[tuple[ModuleItems, ...]]()
    for number in range(rounds):
        yield_point()
        found.append(tuple(_of_round(i, of_sequence, number) for i in items))
        for own in found[-1]:
            check_total(own, rounds)
    return found


def _of_round(items: ModuleItems, of_sequence: I64, number: int) -> ModuleItems:
    """Those of a round; `of_sequence` is int64 [sequences], the round of each."""
    mine = of_sequence == number
    return items.taken(mine[items.sequence], (np.cumsum(mine) - 1)[items.sequence])
