"""What towers hold between forward and backward, and how many microbatches their memory allows."""

from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import Memory, ModuleSpec
from dataserver.planning.layouts.contrastive.arranging import BatchedStep
from dataserver.planning.layouts.contrastive.limits import TowerMemoryError, remedies
from dataserver.planning.layouts.contrastive.options import ContrastiveSchedule
from dataserver.planning.layouts.shared.waves import evenly, most_in_flight
from dataserver.planning.plan.expectation import item_sizes, item_sums
from dataserver.planning.plan.naming import counted, sample_name, unit_of
from dataserver.planning.plan.plan import Arrangement


@dataclass(frozen=True, slots=True)
class TowerMemory:
    """The memory of one tower under one arrangement of a step."""

    batched: BatchedStep
    tower: ModuleSpec
    memory: Memory
    """Memory that each rank of the tower has."""
    arrangement: Arrangement

    def in_flight(self, wanted: I64, schedule: ContrastiveSchedule) -> I64:
        """Return as many microbatches in flight as are wanted, int64 [pp], but no more than memory holds.

        Exact: any so many consecutive microbatches of any rank fit. At least those of a contrastive batch, since
        they wait for its barrier. What stages hold beyond those falls evenly, as in a pipeline (`waves.evenly`), to
        none at the last one, which has no forwards to run ahead.

        Raises:
            TowerMemoryError: these do not fit; names the rank, the largest sample, and changes that would do.
        """
        count, size = self.batched.num_microbatches, self.batched.layout.microbatches
        units = item_sums(self.tower, self.arrangement, item_sizes(self.tower, self.batched.samples), count)
        sums = np.concatenate([np.zeros((len(units), 1), np.int64), np.cumsum(units, axis=1)], axis=1)
        apart = size if schedule is ContrastiveSchedule.BATCH_SYNC else 1
        least = (sums[:, size:] - sums[:, :-size])[:, ::apart]
        if least.max() > self.memory.units:
            rank, window = divmod(int(least.argmax()), least.shape[1])
            raise self._error(schedule, rank, window * apart, int(least.max()))
        most = max(size, most_in_flight(units, self.memory.units, int(wanted.max())))
        ahead = wanted - size
        ahead[:-1] = evenly(ahead[:-1], np.full(len(ahead) - 1, most - size))
        return size + ahead

    def _error(self, schedule: ContrastiveSchedule, rank: int, first: int, need: int) -> TowerMemoryError:
        """What the microbatches from `first` on need, as many as wait for one barrier."""
        samples, late = self.batched.samples, self.arrangement.microbatch - first
        waits = (late >= 0) & (late < self.batched.layout.microbatches)
        sizes, mine = item_sizes(self.tower, samples), self.arrangement.item[(self.arrangement.rank == rank) & waits]
        largest = int(mine[sizes[mine].argmax()])
        sample = sample_name(self.batched.job.stream, samples, largest)
        name, budget = self.tower.name, f"{self.memory.units:,}"
        return TowerMemoryError(
            f"{schedule} needs room for {need:,} {unit_of(self.tower)} on rank {rank} of {name} in step "
            f"{self.batched.step}, where {counted(len(mine), 'sample')} up to {sizes[largest]:,} ({sample}) wait for a "
            f"barrier, but its memory holds {budget}: raise memory.budget_bytes of {name} to "
            f"{need * self.memory.unit_bytes}"
            f"{self._remedies() if schedule is ContrastiveSchedule.BATCH_SYNC else ''}"
        )

    def _remedies(self) -> str:
        """Other changes that would do for this step; overlap of batches (`distmm_pipe`) is worth none of them."""

        def sizes(tower: ModuleSpec, batch: int) -> I64:
            return item_sizes(tower, self.batched.samples).reshape(-1, batch)

        return remedies(self.batched.job.spec, sizes, len(self.batched.samples))
