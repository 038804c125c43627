"""A job over open datasets: from the indexes to the plans of its steps."""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TypeVar

import numpy as np

from dataserver.dataset import Dataset
from dataserver.jobs.kept import Kept
from dataserver.jobs.sizes import memory_of
from dataserver.jobs.tables import ShardTables
from dataserver.jobs.turns import Turns, Unwanted, always_wanted
from dataserver.planning.gathering import Window, gather_step
from dataserver.planning.identity import Job, JobSpecError
from dataserver.planning.layout import Limits, layout_of
from dataserver.planning.order import Span, StreamOrder, units_of
from dataserver.planning.pacing import pace
from dataserver.planning.plan import StepPlan
from dataserver.planning.plan_limits import PlanLimitError, check_contents, limits_of
from dataserver.planning.planner import plan_step
from dataserver.planning.samples import I64, StepSamples

Value = TypeVar("Value")


class JobPlanner:
    """Plans the steps of one job, each once, for all streams. Thread-safe."""

    def __init__(
        self,
        job: Job,
        datasets: Sequence[Dataset],
        kept: Kept | None = None,
        turns: Turns | None = None,
        unwanted: Unwanted = always_wanted,
        planned: Callable[[float], object] = lambda _: None,
    ) -> None:
        """Size every shard of the job's datasets once, to lay out the axes.

        Args:
            job: the job.
            datasets: the open datasets, in the order of the job's list, with matching fingerprints.
            kept: what the jobs of a server keep together; by default this planner's own.
            turns: in which this job computes with the others of a server, from here on; by default alone.
            unwanted: whether nobody waits for the planner any more.
            planned: told of each plan that was made, with the seconds it took, turns of other jobs included.

        Raises:
            JobSpecError: samples are of a kind that the job's modules do not handle, or a step is too large to plan.
            TokensMissingError: a dataset is not counted for the job's tokenizer; names the command.
            FilterError: a filter does not fit the dataset's columns.
            SampleTooLargeError: a sample cannot fit a sequence, or a module's memory.
            TowerMemoryError: contrastive batches of the largest samples would not fit a tower's memory.
            DatasetEmptyError: nothing is left of a dataset.
            UnwantedError: nobody waits for the planner any more. What was sized is kept, where others may find it.
        """
        self.job = job
        self._most = limits_of(job.spec.execution)
        self._kept = Kept() if kept is None else kept
        self._tables = ShardTables(job, datasets, self._kept)
        self._turns = Turns() if turns is None else turns
        self._planned = planned
        try:
            self._order = self.in_turn(lambda: self._lay_out(len(datasets)), unwanted)
        except ValueError as error:
            if type(error) in (ValueError, PlanLimitError):  # of the planner's limits, which know no job
                raise JobSpecError(str(error)) from error
            raise

    @property
    def num_steps(self) -> int:
        """Steps until the job ends."""
        return self._order.num_steps

    @property
    def num_bytes(self) -> int:
        """Memory that the job and its axes take; what is kept with other jobs' is not counted."""
        return memory_of((self.job, self._order))

    def plan(self, step: int, unwanted: Unwanted = always_wanted) -> StepPlan:
        """The plan of one step, computed by the first caller while the others wait.

        Raises:
            StepOutOfRangeError: the job ends before.
            UnwantedError: the caller no longer waits. The plan is made all the same while another one does.
        """

        def compute(unwanted: Unwanted) -> StepPlan:
            began = monotonic()
            plan = self.in_turn(lambda: plan_step(self.job, step, self.samples(step)), unwanted)
            self._planned(monotonic() - began)
            return plan

        return self._kept.plans.get((self.job.job_id, step), compute, unwanted)

    def in_turn(self, work: Callable[[], Value], unwanted: Unwanted = always_wanted) -> Value:
        """Compute something else for the job, in turns with all others.

        Raises:
            UnwantedError: nobody waits for it any more.
        """
        return self._turns.run(self.job.job_id, work, unwanted)

    def samples(self, step: int) -> StepSamples:
        """The samples of one step in canonical order.

        Raises:
            StepOutOfRangeError: the job ends before.
        """
        return gather_step(self.job.stream, self._order, step, self._window, self._most)

    def _window(self, span: Span) -> Window:
        return self._tables.window(self._order, span)

    def _lay_out(self, num_datasets: int) -> StreamOrder:
        limits = layout_of(self.job.spec.execution).limits(self.job.spec)
        counts, totals = zip(*(self._measure(d, limits) for d in range(num_datasets)), strict=True)
        order = StreamOrder(self.job.stream, self.job.spec.execution.end, totals)
        check_contents(self.job.spec, *(order.in_step(number) for number in zip(*counts, strict=True)))
        limits.check(order.repeats(self.job.stream.contrastive_batch or 1))
        return order

    def _measure(self, dataset: int, limits: Limits) -> tuple[tuple[int, int], I64]:
        """Samples and images of a dataset, and int64 [shards]: the length of each shard on the dataset's axis."""
        totals = np.zeros(self._tables.num_shards(dataset), np.int64)
        samples = images = 0
        for shard in range(len(totals)):
            pace()
            table = self._tables.table(dataset, shard)
            limits.add(dataset, table, self._tables.where(dataset, shard))
            totals[shard] = units_of(self.job.stream, table).sum()
            samples, images = samples + len(table.row), images + len(table.image_rows)
        return (samples, images), totals
