"""Where a stream stands when another one continues it: what of its epoch each dataset has behind it.

It is said in samples, not in units, so that the next stream may size, filter and shuffle the rest as it likes, over
more shards. Its first epoch of the dataset is that rest; the epochs behind it are whole again.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import Continuation, DatasetSpec, Stream
from dataserver.planning.stream.axis import MAX_EPOCH, Axis
from dataserver.planning.stream.documents import Split
from dataserver.planning.stream.gathering import Window, pick_rows
from dataserver.planning.stream.mixture import Mixture
from dataserver.planning.stream.samples import ROW_BITS, ShardTable
from dataserver.planning.stream.sizing import joined_parts
from dataserver.planning.stream.windows import Span


@dataclass(frozen=True, slots=True)
class Seen:
    """What earlier streams had of the epoch that a dataset is in."""

    epoch: int
    shards: frozenset[str] = frozenset()
    """Names of the shards that have nothing left."""
    rows: Mapping[str, I64] = field(default_factory=dict)
    """Rows of other shards that were had, int64 [k] each."""
    parts: Mapping[str, I64] = field(default_factory=dict)
    """Parts of documents of other shards that were had, int64 [k, 2]: row, and number of the part."""
    division: str | None = None
    """How these documents were split (`division_of`)."""

    @property
    def begun(self) -> set[str]:
        """Names of the shards with something left and something had."""
        return {*self.rows, *self.parts}

    def left(self, shard: str, table: ShardTable, division: str | None) -> ShardTable:
        """The samples of a shard that are left of the epoch.

        Where documents are split in another way than before, those that were begun are left out.
        """
        if shard in self.shards:
            return pick_rows(table, np.zeros(0, np.int64))
        if shard not in self.begun:
            return table
        had, nothing = np.isin(table.row, self.rows.get(shard, np.zeros(0, np.int64))), np.zeros((0, 2), np.int64)
        parts = self.parts.get(shard, nothing)
        if table.parts is None or division != self.division:
            had |= np.isin(table.row, parts[:, 0])
        else:
            had |= np.isin(_numbered(table.row, table.parts[:, 0]), _numbered(*parts.T))
        return pick_rows(table, np.flatnonzero(~had))


def division_of(stream: Stream, spec: DatasetSpec) -> str | None:
    """What tells apart how documents of a dataset are split: two streams with the same have the same parts."""
    split = Split.of(stream, spec)
    if split is None:
        return None
    texts = spec.model_dump(mode="json", include={"caption", "text_transforms", "transformed"})
    sizing = stream.sizing.model_dump(mode="json", exclude_none=True)
    return json.dumps([split.key(), stream.tokenizer.digest, texts, sizing], sort_keys=True)


def _numbered(row: I64, part: I64) -> I64:
    """One number for a part, int64 [k]; a shard has fewer than 2^31 rows, and a document fewer parts."""
    return (row << ROW_BITS) | part


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The last step of an earlier stream, on the axis of one of its datasets."""

    first: int
    """First unit of the step."""
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
    axis: Axis,
    unit: int,
    names: Sequence[str],
    windows: Callable[[Span], Iterable[Window]],
    before: Seen | None,
    division: str | None = None,
) -> Seen:
    """What a stream and those that it continues have had of a dataset's epoch before a unit of its axis.

    Args:
        axis: of the dataset in that stream.
        unit: where the stream ends.
        names: of the dataset's shards in that stream.
        windows: gives the window in which a span lies, or its parts.
        before: what the streams before it have had; None for a dataset that they did not have.
        division: how that stream split documents (`division_of`).

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
    epoch, whole, spans = axis.before(unit)
    shards, rows, parts = set[str](), dict[str, I64](), dict[str, I64]()
    if before is not None and before.epoch == epoch:
        shards, rows, parts = set(before.shards), dict(before.rows), dict(before.parts)
        if before.division != division:  # their parts have no number here
            for name, of in parts.items():
                rows[name] = np.concatenate([rows.get(name, of[:0, 0]), np.unique(of[:, 0])])
            parts = {}
    shards.update(names[shard] for shard in whole)
    taken = [window.part(span) for span in spans for window in windows(span)]
    samples = np.concatenate([np.zeros(0, np.uint64), *(sample for sample, _ in taken)])
    of_shard, row = samples >> np.uint64(ROW_BITS), (samples & np.uint64((1 << ROW_BITS) - 1)).astype(np.int64)
    sizes = joined_parts([found for _, found in taken]) if division is not None else None
    for shard in np.unique(of_shard).tolist():
        here, name = of_shard == shard, names[shard]
        if sizes is None:
            rows[name] = np.concatenate([rows.get(name, row[:0]), row[here]])
        else:
            had = np.stack([row[here], sizes[here, 0]], axis=1)
            parts[name] = np.concatenate([parts.get(name, had[:0]), had])
    rows, parts = ({name: had for name, had in of.items() if name not in shards} for of in (rows, parts))
    return Seen(epoch, frozenset(shards), rows, parts, division)
