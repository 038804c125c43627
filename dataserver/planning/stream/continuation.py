"""Where a stream stands when another one continues it: what of its epoch each dataset has behind it.

It is said in samples, not in units, so that the next stream may size, filter and shuffle the rest as it likes, over
more shards. Its first epoch of the dataset is that rest; the epochs behind it are whole again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import Continuation
from dataserver.planning.stream.axis import MAX_EPOCH, Axis
from dataserver.planning.stream.gathering import Window, pick_rows
from dataserver.planning.stream.mixture import Mixture
from dataserver.planning.stream.samples import ROW_BITS, ShardTable
from dataserver.planning.stream.windows import Span


@dataclass(frozen=True, slots=True)
class Seen:
    """What earlier streams had of the epoch that a dataset is in."""

    epoch: int
    shards: frozenset[str] = frozenset()
    """Names of the shards that have nothing left."""
    rows: Mapping[str, I64] = field(default_factory=dict)
    """Of other shards the rows that were had, int64 [k] each."""

    def left(self, shard: str, table: ShardTable) -> ShardTable:
        """The samples of a shard that are left of the epoch."""
        if shard in self.shards:
            return pick_rows(table, np.zeros(0, np.int64))
        rows = self.rows.get(shard)
        return table if rows is None else pick_rows(table, np.flatnonzero(~np.isin(table.row, rows)))


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The last step of an earlier stream, on the axis of one of its datasets."""

    first: int
    """Its first unit."""
    last: int
    """The first unit behind it, had it been a step like the others."""
    epochs: int | None
    """Its job ended with so many, and this step was padded; None if it was a step like the others."""

    def on(self, axis: Axis, name: str) -> int:
        """The first unit behind the samples that were read.

        Raises:
            ValueError: the job had not ended there.
        """
        if self.epochs is None or not self.last:
            return self.last
        goal = axis.end_of(self.epochs)
        if self.last < goal:
            raise ValueError(
                f"stream.continues.epochs is {self.epochs}, and the earlier stream had not completed so many epochs of "
                f"dataset {name!r} before stream.continues.step: leave epochs out, unless the earlier job ended there "
                "with that end.epochs"
            )
        return goal if self.first < goal else self.last

    def epochs_within(self, axis: Axis) -> int:
        """Epochs that were complete within the step, so that its job may have ended there; 0 if none was."""
        if not axis.length or self.last <= self.first:
            return 0
        begun, _ = axis.epoch_at(self.last - 1)
        return begun if begun > axis.epoch_at(self.first)[0] else 0


def last_step_of(earlier: Continuation) -> list[StepEnd]:
    """The last step of an earlier stream, for each of its datasets."""
    mixture = Mixture(earlier.stream)
    bounds = zip(mixture.bounds(earlier.step - 1), mixture.bounds(earlier.step), strict=True)
    return [StepEnd(first, last, earlier.epochs) for first, last in bounds]


def seen_before(
    axis: Axis, unit: int, names: Sequence[str], windows: Callable[[Span], Iterable[Window]], before: Seen | None
) -> Seen:
    """What a stream and those that it continues have had of a dataset's epoch before a unit of its axis.

    Args:
        axis: of the dataset in that stream.
        unit: where the stream ends.
        names: of the dataset's shards in that stream.
        windows: gives the window in which a span lies, or its parts.
        before: what the streams before it have had; None for a dataset that they did not have.

    Raises:
        ValueError: the stream had more epochs of the dataset than plans can name.
    """
    if not axis.length:  # its filter left nothing, and it took nothing
        return before or Seen(epoch=0)
    if axis.epoch_at(unit)[0] > MAX_EPOCH:
        raise ValueError(
            f"an earlier stream had more than {MAX_EPOCH:,} epochs of a dataset, which plans cannot name: lower "
            "stream.continues.step to that of its checkpoint"
        )
    epoch, whole, parts = axis.before(unit)
    shards, rows = set[str](), dict[str, I64]()
    if before is not None and before.epoch == epoch:
        shards, rows = set(before.shards), dict(before.rows)
    shards.update(names[shard] for shard in whole)
    taken = [np.zeros(0, np.uint64), *(window.part(part)[0] for part in parts for window in windows(part))]
    samples = np.concatenate(taken)
    for shard in np.unique(samples >> np.uint64(ROW_BITS)).tolist():
        of_shard = samples[samples >> np.uint64(ROW_BITS) == shard] & np.uint64((1 << ROW_BITS) - 1)
        earlier = rows.get(names[shard], np.zeros(0, np.int64))
        rows[names[shard]] = np.concatenate([earlier, of_shard.astype(np.int64)])
    return Seen(epoch, frozenset(shards), {name: of for name, of in rows.items() if name not in shards})
