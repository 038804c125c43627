"""What towers hold between forward and backward, and how many microbatches their memory allows."""

from dataclasses import dataclass

import numpy as np

from dataserver.planning.contrastive.limits import TowerMemoryError, remedies
from dataserver.planning.contrastive.options import ContrastiveSchedule
from dataserver.planning.expectation import item_sizes, item_sums
from dataserver.planning.identity import Job
from dataserver.planning.jobspec import Memory, ModuleSpec
from dataserver.planning.naming import counted, sample_name, unit_of
from dataserver.planning.plan import Arrangement
from dataserver.planning.samples import I64, StepSamples
from dataserver.planning.waves import evenly


@dataclass(frozen=True, slots=True)
class TowerMemory:
    """The memory of one tower under one arrangement of a step."""

    job: Job
    step: int
    samples: StepSamples
    tower: ModuleSpec
    memory: Memory
    """Of the tower."""
    arrangement: Arrangement
    batch_size: int
    """Microbatches of a contrastive batch."""

    def in_flight(self, wanted: I64, schedule: ContrastiveSchedule) -> I64:
        """As many microbatches in flight as are wanted, int64 [pp], but no more than memory holds.

        Exact: any so many consecutive microbatches of any rank fit. At least those of a contrastive batch, all of which
        wait for its barrier. What stages hold beyond those falls evenly, as in a pipeline (`waves.evenly`), to none
        at the last one, which has no forwards to run ahead.

        Raises:
            TowerMemoryError: these do not fit; names the rank, the largest sample, and changes that would do.
        """
        count = int(self.arrangement.microbatch.max()) + 1
        units = item_sums(self.tower, self.arrangement, item_sizes(self.tower, self.samples), count)
        apart = self.batch_size if schedule is ContrastiveSchedule.BATCH_SYNC else 1
        least = _together(units, self.batch_size)[:, ::apart]
        if least.max() > self.memory.units:
            rank, window = divmod(int(least.argmax()), least.shape[1])
            raise self._error(schedule, rank, window * apart, int(least.max()))
        most = self.batch_size
        while most < wanted.max() and _together(units, most + 1).max() <= self.memory.units:
            most += 1
        ahead = wanted - self.batch_size
        ahead[:-1] = evenly(ahead[:-1], np.full(len(ahead) - 1, most - self.batch_size))
        return self.batch_size + ahead

    def _error(self, schedule: ContrastiveSchedule, rank: int, first: int, need: int) -> TowerMemoryError:
        """What the microbatches from `first` on need, as many as wait for one barrier."""
        sizes, late = item_sizes(self.tower, self.samples), self.arrangement.microbatch - first
        mine = self.arrangement.item[(self.arrangement.rank == rank) & (late >= 0) & (late < self.batch_size)]
        largest = int(mine[sizes[mine].argmax()])
        sample = sample_name(self.job.stream, self.samples, largest)
        name, room = self.tower.name, f"{self.memory.units:,}"
        return TowerMemoryError(
            f"{schedule} needs room for {need:,} {unit_of(self.tower)} on rank {rank} of {name} in step {self.step}, "
            f"where {counted(len(mine), 'sample')} up to {sizes[largest]:,} ({sample}) wait for a barrier, but its "
            f"memory holds {room}: raise memory.room_bytes of {name} to {need * self.memory.unit_bytes}"
            f"{self._remedies() if schedule is ContrastiveSchedule.BATCH_SYNC else ''}"
        )

    def _remedies(self) -> str:
        """Other changes that would do for this step; overlap of batches (`distmm_pipe`) is worth none of them."""

        def sizes(tower: ModuleSpec, batch: int) -> I64:
            return item_sizes(tower, self.samples).reshape(-1, batch)

        return remedies(self.job.spec, sizes, len(self.samples))


def _together(units: I64, number: int) -> I64:
    """Units of every `number` consecutive microbatches. int64 [dp, microbatches - number + 1]."""
    sums = np.concatenate([np.zeros((len(units), 1), np.int64), np.cumsum(units, axis=1)], axis=1)
    found: I64 = sums[:, number:] - sums[:, : sums.shape[1] - number]
    return found
