"""Who holds which samples of a contrastive step: every tower spreads each batch over its own ranks and microbatches."""

from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64
from dataserver.planning.balancing import BALANCERS, BinBudget, BinBudgetError
from dataserver.planning.costs.model import forward_ns
from dataserver.planning.job.fields import BalancePolicy, ModuleSpec
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.contrastive.batches import (
    BatchedArrangement,
    balance_batches,
    batches_in_order,
    contrastive_batches,
    deal_by_size,
    pad_batches,
)
from dataserver.planning.layouts.contrastive.options import ContrastiveOptions
from dataserver.planning.plan.arranging import arrange_items
from dataserver.planning.plan.expectation import item_sizes
from dataserver.planning.plan.plan import Arrangement
from dataserver.planning.stream.samples import StepSamples


@dataclass(frozen=True, slots=True)
class BatchedStep:
    """The samples of one step in their contrastive batches."""

    job: Job
    step: int
    samples: StepSamples
    batch: I64
    """int64 [n]: the contrastive batch of each sample."""

    @property
    def towers(self) -> tuple[ModuleSpec, ...]:
        """All modules of the job."""
        return self.job.spec.execution.modules

    @property
    def layout(self) -> ContrastiveOptions:
        """What the job says about this layout."""
        return self.job.spec.execution.options(ContrastiveOptions)

    @property
    def num_batches(self) -> int:
        """Contrastive batches of the step, one at least."""
        return int(self.batch[-1]) + 1

    @property
    def num_microbatches(self) -> int:
        """Microbatches that each rank runs in the step."""
        return self.num_batches * self.layout.microbatches


def batched_step(job: Job, step: int, samples: StepSamples) -> BatchedStep:
    """The contrastive batches of a step: runs in canonical order.

    Raises:
        ValueError: samples that are no pairs, or no whole contrastive batches.
    """
    batch = contrastive_batches(len(samples), job.stream.contrastive_batch or 1)
    if not len(samples) or (np.diff(samples.image_offsets) != 1).any():
        raise ValueError(f"step {step} has no samples, or not one image for each; contrastive samples are pairs")
    return BatchedStep(job, step, samples, batch)


def arrange(batched: BatchedStep, tower: ModuleSpec, *, balanced: bool) -> Arrangement:
    """The samples of every batch on ranks and microbatches; within these, in canonical order."""
    sizes = item_sizes(tower, batched.samples)
    place = _spread(batched, tower, sizes) if balanced else _in_order(batched, tower, sizes)
    return arrange_items(tower, sizes, place.rank, place.microbatch)


def _in_order(batched: BatchedStep, tower: ModuleSpec, sizes: I64) -> BatchedArrangement:
    return batches_in_order(sizes, batched.batch, tower.dp, batched.layout.microbatches)


def _spread(batched: BatchedStep, tower: ModuleSpec, sizes: I64) -> BatchedArrangement:
    """As the balance of the tower asks for, within its memory."""
    if tower.balance is BalancePolicy.NONE:
        return _in_order(batched, tower, sizes)
    loads, ranks, each = forward_ns(tower.cost, sizes), tower.dp, batched.layout.microbatches
    budget = None if tower.memory is None else BinBudget(sizes, tower.memory.units)
    try:
        if tower.padded:
            return pad_batches(loads, batched.batch, ranks, each, budget)
        return balance_batches(loads, batched.batch, ranks, each, BALANCERS[tower.balance.value], budget)
    except BinBudgetError:  # placing by time found no way; by size there is one in every job that was accepted
        return deal_by_size(sizes, batched.batch, ranks, each, tower.padded)
