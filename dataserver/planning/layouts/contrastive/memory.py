"""What towers hold between forward and backward, and how many microbatches their memory allows."""

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import Memory, ModuleSpec
from dataserver.planning.layouts.contrastive.arranging import BatchedStep
from dataserver.planning.layouts.contrastive.limits import Sizes, TowerMemoryError, remedies
from dataserver.planning.layouts.contrastive.options import ContrastiveSchedule
from dataserver.planning.layouts.shared.waves import evenly, most_in_flight
from dataserver.planning.plan.expectation import item_sizes, item_sums
from dataserver.planning.plan.naming import counted, sample_name, unit_of
from dataserver.planning.plan.plan import Arrangement


def in_flight_within_memory(
    batched: BatchedStep, tower: ModuleSpec, arrangement: Arrangement, schedule: ContrastiveSchedule, wanted: I64
) -> I64:
    """As many microbatches in flight as are wanted, int64 [pp], but no more than the memory of a tower holds.

    Exact: any so many consecutive microbatches of any rank fit. At least those of a contrastive batch, since they wait
    for its barrier. What stages hold beyond those falls evenly, as in a pipeline (`waves.evenly`), to none at the last
    one, which has no forwards to run ahead.

    Raises:
        TowerMemoryError: these do not fit; names the rank, the largest sample, and changes that would do.
    """
    if tower.memory is None:
        return wanted
    count, size = batched.num_microbatches, batched.layout.microbatches
    units = item_sums(tower, arrangement, item_sizes(tower, batched.samples), count)
    sums = np.concatenate([np.zeros((len(units), 1), np.int64), np.cumsum(units, axis=1)], axis=1)
    apart = size if schedule is ContrastiveSchedule.BATCH_SYNC else 1
    least = (sums[:, size:] - sums[:, :-size])[:, ::apart]
    if least.max() > tower.memory.units:
        rank, window = divmod(int(least.argmax()), least.shape[1])
        late = arrangement.microbatch - window * apart
        waiting = arrangement.item[(arrangement.rank == rank) & (late >= 0) & (late < size)]
        raise _refusal(batched, tower, tower.memory, schedule, rank, waiting, int(least.max()))
    most = max(size, most_in_flight(units, tower.memory.units, int(wanted.max())))
    ahead = wanted - size
    ahead[:-1] = evenly(ahead[:-1], np.full(len(ahead) - 1, most - size))
    return size + ahead


def _refusal(
    batched: BatchedStep,
    tower: ModuleSpec,
    memory: Memory,
    schedule: ContrastiveSchedule,
    rank: int,
    waiting: I64,
    need: int,
) -> TowerMemoryError:
    """What to say where a rank has no room for the samples that wait for one barrier, int64 [k]."""
    sizes = item_sizes(tower, batched.samples)
    largest = int(waiting[sizes[waiting].argmax()])
    sample = sample_name(batched.job.stream, batched.samples, largest)
    other_changes = ""
    if schedule is ContrastiveSchedule.BATCH_SYNC:  # overlap of batches (`distmm_pipe`) is worth none of them
        other_changes = remedies(batched.job.spec, _sizes_in(batched), len(batched.samples))
    return TowerMemoryError(
        f"{schedule} needs room for {need:,} {unit_of(tower)} on rank {rank} of {tower.name} in step {batched.step}, "
        f"where {counted(len(waiting), 'sample')} up to {sizes[largest]:,} ({sample}) wait for a barrier, but its "
        f"memory holds {memory.units:,}: raise memory.budget_bytes of {tower.name} to {need * memory.unit_bytes}"
        f"{other_changes}"
    )


def _sizes_in(batched: BatchedStep) -> Sizes:
    return lambda tower, batch: item_sizes(tower, batched.samples).reshape(-1, batch)
