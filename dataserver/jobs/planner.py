"""A job over open datasets: from the indexes to the plans of its steps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from dataserver.dataset import Dataset
from dataserver.jobs.cache import JobCache
from dataserver.jobs.continuing import EarlierStreams
from dataserver.jobs.long_chats import LongChatCounts
from dataserver.jobs.memory_usage import memory_of
from dataserver.jobs.read_ahead import ReadAhead
from dataserver.jobs.scheduler import FairScheduler, IsCancelled, never_cancelled
from dataserver.jobs.split_documents import counts_as_indexed, split_note, whole_rules
from dataserver.jobs.tables import ShardTables, rest_of, rules_of
from dataserver.planning import I64, yield_point
from dataserver.planning.job.fields import DatasetSpec
from dataserver.planning.job.identity import Job, JobSpecError
from dataserver.planning.job.limits import PlanLimitError, check_contents, limits_of
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.stream.gathering import Window, gather_step
from dataserver.planning.stream.order import StreamOrder
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.statistics import ShardStatistics, axis_lengths
from dataserver.planning.stream.windows import Span, units_of
from dataserver.tracing import span

if TYPE_CHECKING:
    from dataserver.planning.layouts.interface import Limits

JOB_CHARS: Final = 12
"""Characters of a job's id that name it in logs and metrics."""
ASIDE: Final = "(aside)"
"""Stands for a job in the scheduler; no id of one is like it."""

Value = TypeVar("Value")
Fetch = Callable[["JobPlanner", int, IsCancelled], StepPlan | None]
"""The plan of a step from elsewhere; None where it is to be made here. WorkCancelledError if nobody waits any more."""


class JobPlanner:
    """Plans the steps of one job, each once, for all streams. Thread-safe."""

    def __init__(
        self,
        job: Job,
        datasets: Sequence[Dataset],
        cache: JobCache | None = None,
        scheduler: FairScheduler | None = None,
        cancelled: IsCancelled = never_cancelled,
        planned: Callable[[float], object] = lambda _: None,
        fetch: Fetch | None = None,
        patience_s: float = float("inf"),
    ) -> None:
        """Lay out the axes from statistics of the datasets, which are computed if there are none.

        Args:
            job: the job.
            datasets: the open datasets, in the order of the job's list, with matching fingerprints.
            cache: what the jobs of a server cache together; by default this planner's own.
            scheduler: shares the server's planning time among its jobs, from here on; by default this job is alone.
            cancelled: whether nobody waits for the planner any more.
            planned: told of each plan that was made, with the seconds it took, the time of other jobs included.
            fetch: asked for each plan before it is made.
            patience_s: time to wait for statistics.

        Raises:
            StatisticsPendingError: they take longer; they are computed all the same, so ask again.
            JobSpecError: samples are of a kind that the job's modules do not handle, or a step is too large to plan.
            TokensMissingError: a dataset is not counted for the job's tokenizer; names the command.
            FilterError: a filter does not fit the dataset's columns.
            CaptionError: a dataset has no sample with a caption that the job names.
            SampleTooLargeError: a sample cannot fit a sequence, or a module's memory.
            TowerMemoryError: contrastive batches of the largest samples would not fit a tower's memory.
            DatasetEmptyError: nothing is left of a dataset.
            DatasetMismatchError: a dataset is no longer as a stream had it that the job continues.
            WorkCancelledError: nobody waits for the planner any more.
        """
        self.job = job
        self._most = limits_of(job.spec.execution)
        self._cache = JobCache() if cache is None else cache
        self._tables = ShardTables(job.stream_id, job.stream, datasets, self._cache)
        self._scheduler = FairScheduler() if scheduler is None else scheduler
        self._planned = planned
        self._fetch = fetch
        self.notes: list[str] = []
        """What people should know of the job, a line each."""
        statistics = []
        for spec, dataset in zip(job.stream.datasets, datasets, strict=True):
            rules = rules_of(job.stream, spec, dataset)
            found = self._cache.statistics.get(dataset, rules, cancelled, patience_s)
            longest = found
            if rules.captions.are_drawn:
                longest = self._cache.statistics.get(dataset, replace(rules, longest=True), cancelled, patience_s)
            statistics.append((found, longest))
            notes = [_null_note(spec, dataset, found)]
            if rules.split is not None and counts_as_indexed(rules):
                whole = self._cache.statistics.get(dataset, whole_rules(rules), cancelled, patience_s)
                counts = int(whole.samples.sum()), int(found.samples.sum())
                notes.append(split_note(spec, rules.split, *counts, has_sound=dataset.has_sound))
            self.notes += filter(None, notes)
        earlier = EarlierStreams(job.stream, datasets, self._cache, cancelled, patience_s)
        try:
            self._tables.seen = self.scheduled(earlier.seen, cancelled)
            self.notes += earlier.notes
            self._order = self.scheduled(lambda: self._lay_out(statistics), cancelled)
        except ValueError as error:
            if type(error) in (ValueError, PlanLimitError):  # of the planner's limits, which know no job
                raise JobSpecError(str(error)) from error
            raise
        self._ahead = ReadAhead(job.job_id, self._order, datasets)

    @property
    def first_step(self) -> int:
        """The first step of the job."""
        return self._order.first_step

    @property
    def num_steps(self) -> int:
        """Steps until the job ends, those of streams that it continues included."""
        return self._order.num_steps

    @property
    def num_bytes(self) -> int:
        """Memory that the job, its axes and what earlier streams had take; what is cached with other jobs' is not
        counted."""
        return memory_of((self.job, self._order, self._tables.seen))

    def plan(self, step: int, cancelled: IsCancelled = never_cancelled) -> StepPlan:
        """The plan of one step, fetched or made by the first caller while the others wait.

        Raises:
            StepOutOfRangeError: the job ends before.
            WorkCancelledError: the caller no longer waits. The plan is made all the same while another one does.
        """
        self._order.check(step)  # before another server is asked for what does not exist

        def compute(cancelled: IsCancelled) -> StepPlan:
            fetched = None if self._fetch is None else self._fetch(self, step, cancelled)
            return self._made(step, cancelled) if fetched is None else fetched

        return self._cache.plans.get((self.job.job_id, step), compute, cancelled)

    def read_ahead(self, step: int) -> None:
        """Begin to read what a step whose images are read here needs, and those soon after it, from stores."""
        self._ahead.reach(step)

    def plan_here(self, step: int, cancelled: IsCancelled = never_cancelled) -> StepPlan:
        """The plan of one step, which is not fetched for this caller; else as `plan`."""
        key = self.job.job_id, step
        if (found := self._cache.plans.find(key)) is not None:
            return found
        plan = self._made(step, cancelled)
        self._cache.plans.put(key, plan)
        return plan

    def _made(self, step: int, cancelled: IsCancelled) -> StepPlan:
        from dataserver.planning.planner import plan_step  # see `_lay_out`

        def compute(cancelled: IsCancelled) -> StepPlan:
            began = monotonic()
            with span("make plan", step=step):
                plan = self.scheduled(lambda: plan_step(self.job, step, self.samples(step)), cancelled)
            self._planned(monotonic() - began)
            return plan

        return self._cache.in_flight.get((self.job.job_id, step), compute, cancelled)

    def scheduled(self, work: Callable[[], Value], cancelled: IsCancelled = never_cancelled) -> Value:
        """Compute something else for the job, when the scheduler lets it.

        Raises:
            WorkCancelledError: nobody waits for it any more.
        """
        return self._scheduler.run(self.job.job_id, work, cancelled)

    def aside(self, work: Callable[[], Value]) -> Value:
        """Compute something that no trainer waits for: it takes turns with all jobs, this one among them."""
        return self._scheduler.run(ASIDE, work)

    def samples(self, step: int) -> StepSamples:
        """The samples of one step in canonical order.

        Raises:
            StepOutOfRangeError: the job ends before.
        """
        return gather_step(self.job.stream, self._order, step, self._windows, self._most)

    def _windows(self, span: Span) -> Iterator[Window]:
        return self._tables.windows(self._order, span, self._order.totals_in(span))

    def _lay_out(self, statistics: Sequence[tuple[ShardStatistics, ShardStatistics]]) -> StreamOrder:
        from dataserver.planning.layouts.interface import layout_of

        limits = layout_of(self.job.spec.execution).limits(self.job.spec)
        lengths = [self._lengths(dataset, *found, limits) for dataset, found in enumerate(statistics)]
        rests = [rest_of(self._tables, dataset, of) for dataset, of in enumerate(lengths)]
        order = StreamOrder(self.job.stream, self.job.spec.execution.end, lengths, rests)
        counts = ([int(s.samples.sum()) for s, _ in statistics], [int(s.images.sum()) for s, _ in statistics])
        check_contents(self.job.spec, *(order.in_step(number) for number in counts))
        limits.check(order.repeats(self.job.stream.contrastive_batch or 1))
        return order

    def _lengths(self, dataset: int, statistics: ShardStatistics, longest: ShardStatistics, limits: "Limits") -> I64:
        """The length of each shard on its dataset's axis, int64 [shards]; what statistics leave open is looked at.

        Where samples draw captions, limits go by the longest one of each.
        """
        are_chats, long = self._tables.are_chats(dataset), LongChatCounts(self._tables, dataset)
        lengths, certain = axis_lengths(self.job.stream, statistics, are_chats)
        clear = limits.add_statistics(dataset, longest)
        clear &= ~self._tables.may_have_others(dataset)  # statistics do not tell these from images
        for shard in np.flatnonzero(~(certain & clear)).tolist():
            yield_point()
            table = self._tables.table(dataset, shard)
            if not clear[shard]:
                limits.add(dataset, table, self._tables.where(dataset, shard))
            lengths[shard] = units_of(self.job.stream, table).sum()
            if are_chats and not certain[shard]:
                long.add(shard)
        self.notes += long.notes(int(statistics.samples.sum()))
        return lengths


def _null_note(spec: DatasetSpec, dataset: Dataset, statistics: ShardStatistics) -> str:
    """Say how many samples a filter drops, if it drops any for a null."""
    nulls = int(statistics.null_drops.sum())
    if not nulls:
        return ""
    total = sum(shard.num_samples for shard in dataset.shards)
    left = f"{int(statistics.samples.sum())}{'' if spec.documents is None else ' parts'}"
    return (
        f"dataset {spec.name!r}: the filter {spec.filter!r} leaves {left} of {total} samples;"
        f" {nulls} are dropped because a column of it is null"
    )
