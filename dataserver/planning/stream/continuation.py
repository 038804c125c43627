"""Where a stream stands when another one continues it: what of its epoch each dataset has behind it.

It is said in samples, not in units, so that the next stream may size, filter and shuffle the rest as it likes, over
more shards. Its first epoch of the dataset is that rest; the epochs behind it are whole again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dataserver.planning import I64
from dataserver.planning.stream.axis import Axis
from dataserver.planning.stream.gathering import Window, pick_rows
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
    """
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
