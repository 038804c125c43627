"""Which samples a step holds: the canonical order and random access to it.

Each dataset is an axis. An epoch of it is laid out shard by shard in a keyed permutation of the shards, and keyed draws
mix the samples of `shuffle_window` shards. In order version 1 groups of so many shards are windows, and the samples of
a window are sorted by their draws; in version 2 the window slides (`sliding.py`), and what is sorted at a time is a
slot of it. A sample's length on the axis is its nominal tokens, or one without packing. Epoch p occupies
[p L, (p + 1) L), L being the length of the dataset, and step k takes the samples whose first unit falls between the
bounds of steps k and k + 1. So a step is found from the totals of the shards and the tables of the few shards in its
windows, whatever the dataset's size.
"""

from bisect import bisect_left
from collections.abc import Sequence

from dataserver.planning import I64
from dataserver.planning.job.fields import MAX_INTEGER, End, LastStep, Stream
from dataserver.planning.stream.axis import MAX_EPOCH, Axis, Rest, Stretch
from dataserver.planning.stream.mixture import Mixture
from dataserver.planning.stream.windows import Span, WindowOrder


class DatasetEmptyError(ValueError):
    """Filter and quarantine leave nothing of a dataset of the mixture."""


class StepOutOfRangeError(ValueError):
    """A step beyond the end of the job."""


class StreamOrder(WindowOrder):
    """The canonical order of a stream over datasets whose shard totals are known."""

    def __init__(
        self, stream: Stream, end: End, shard_totals: Sequence[I64], rests: Sequence[Rest | None] | None = None
    ) -> None:
        """Lay out the axes.

        Args:
            stream: the job's stream.
            end: when the job ends.
            shard_totals: for each dataset int64 [shards]: units of each shard in name order (sums of `units_of`).
            rests: for each dataset what an earlier stream left of an epoch, where this one continues another.

        Raises:
            DatasetEmptyError: a dataset with a positive weight has no unit, or nothing fills a step.
            ValueError: the job would take more steps than JSON can count, or more epochs of a dataset than plans can
                name, or ends before its stream begins.
        """
        super().__init__(stream)
        self.first_step = stream.first_step
        rests = [None] * len(shard_totals) if rests is None else rests
        self._axes = [Axis(stream, d, *found) for d, found in enumerate(zip(shard_totals, rests, strict=True))]
        self._mixture = Mixture(stream)
        self._taken = [self._mixture.takes(d) for d in range(len(self._axes))]
        for spec, totals, axis, taken in zip(stream.datasets, shard_totals, self._axes, self._taken, strict=True):
            if taken and axis.length == 0:
                raise DatasetEmptyError(
                    f"dataset {spec.name}: filter {spec.filter!r} and quarantine leave no sample of "
                    f"{len(totals)} shards; at least one is required, so loosen the filter or set the weight to 0"
                )
        self.num_steps, self._stops = self._find_end(end)
        self._check_epochs()

    def in_step(self, counts: Sequence[int]) -> int:
        """The most of something that a step has on average over an epoch, from how many each dataset has."""
        return max(self._in_step(first, counts) for first in self._mixture.first_steps if first < self.num_steps)

    def _in_step(self, step: int, counts: Sequence[int]) -> int:
        bounds = zip(self._mixture.bounds(step), self._mixture.bounds(step + 1), strict=True)
        quotas = [after - before for before, after in bounds]
        lengths = [axis.length for axis in self._axes]
        return sum(q * n // length for q, n, length in zip(quotas, counts, lengths, strict=True) if length)

    def repeats(self, run: int) -> list[int]:
        """How often a sample of each dataset can be among `run` consecutive ones of a step, without packing.

        Once unless an epoch ends, once more for each epoch that then begins, and not at all without a weight.
        """
        found = []
        for axis, taken in zip(self._axes, self._mixture.bounds(self.num_steps), strict=True):
            one_epoch = not taken or axis.epoch_at(taken - 1)[0] == axis.epoch_at(0)[0]
            found.append(int(taken > 0) if one_epoch else 1 + -(-(run - 1) // axis.length))
        return found

    def check(self, step: int) -> None:
        """Raise StepOutOfRangeError if the stream begins after a step, or the job ends before it."""
        if 0 <= step < self.first_step:
            raise StepOutOfRangeError(
                f"step {step} belongs to the stream that this one continues from step {self.first_step} on"
            )
        if not 0 <= step < self.num_steps:
            raise StepOutOfRangeError(f"step {step} does not exist; the job ends after step {self.num_steps - 1}")

    def spans(self, step: int) -> list[Span]:
        """The windows that a step touches, dataset by dataset in axis order.

        Raises:
            StepOutOfRangeError: the job has no such step.
        """
        self.check(step)
        firsts, lasts = self._mixture.bounds(step), self._mixture.bounds(step + 1)
        if step == self.num_steps - 1:
            lasts = [self._stops.get(dataset, last) for dataset, last in enumerate(lasts)]
        return [span for axis, *bounds in zip(self._axes, firsts, lasts, strict=True) for span in axis.spans(*bounds)]

    def needed(self, first: int, last: int) -> list[Stretch]:
        """What the steps from `first` to `last`, which is one of them, and those soon after them may read.

        Servers read ahead by it. What is needed first comes first, for each dataset.

        Raises:
            StepOutOfRangeError: the job has no such step.
        """
        self.check(first)
        self.check(last)
        bounds = zip(self._axes, self._mixture.bounds(first), self._mixture.bounds(last + 1), strict=True)
        return list(dict.fromkeys(stretch for axis, *found in bounds for stretch in axis.needed(*found)))

    def totals_in(self, span: Span) -> I64:
        """The length of each shard on its dataset's axis in the epoch of a span, int64 [shards]."""
        return self._axes[span.dataset].totals_in(span.epoch)

    def _find_end(self, end: End) -> tuple[int, dict[int, int]]:
        """The number of steps, and where the axes of the datasets that end inside the last one stop."""
        first = self.first_step
        if end.epochs is None:
            steps = end.steps or 0
            if steps <= first:
                raise ValueError(f"end.steps is {steps} and the stream begins with step {first}; raise end.steps")
            return steps, {}
        goals = {d: axis.end_of(end.epochs) for d, axis in enumerate(self._axes) if self._taken[d]}

        def complete(step: int) -> bool:
            bounds = self._mixture.bounds(step)
            return all(bounds[d] >= goal for d, goal in goals.items())

        high = first + 1
        while not complete(high):
            high = first + 2 * (high - first)
            if high > MAX_INTEGER:
                raise ValueError(self._never_complete(end.epochs, goals))
        steps = bisect_left(range(high), True, first, key=complete)
        if steps == first:
            raise ValueError(
                f"every dataset has completed {end.epochs} epochs before step {first}, with which the stream begins; "
                "raise end.epochs"
            )
        before, after = self._mixture.bounds(steps - 1), self._mixture.bounds(steps)
        stops = {d: goal for d, goal in goals.items() if before[d] < goal < after[d]}
        if stops and end.last is LastStep.DROP:
            steps, stops = steps - 1, {}
        if steps == first:
            raise DatasetEmptyError(
                "the datasets do not fill a single step and end.last is drop; lower global_batch or set end.last to pad"
            )
        return steps, stops

    def _check_epochs(self) -> None:
        for spec, axis, taken in zip(
            self.stream.datasets, self._axes, self._mixture.bounds(self.num_steps), strict=True
        ):
            if taken and axis.epoch_at(taken - 1)[0] > MAX_EPOCH:
                raise ValueError(
                    f"dataset {spec.name} would begin more than {MAX_EPOCH:,} epochs in {self.num_steps:,} steps, "
                    "which plans cannot name; lower end.steps or end.epochs"
                )

    def _never_complete(self, epochs: int, goals: dict[int, int]) -> str:
        """Why datasets do not complete their epochs."""
        last, bounds = self._mixture.first_steps[-1], self._mixture.bounds(MAX_INTEGER)
        weights = self.stream.weights_at(last)
        ended = [self.stream.datasets[d].name for d, goal in goals.items() if weights[d] == "0" and bounds[d] < goal]
        if ended:
            return (
                f"datasets {ended} have weight 0 from step {last} on, before they complete {epochs} epochs; give them "
                "a weight, or end the job with end.steps"
            )
        return (
            f"the job would take more than {MAX_INTEGER} steps to complete {epochs} epochs of every "
            "dataset; raise the smallest weight, or set it to 0, or end the job with end.steps"
        )
