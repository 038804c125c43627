"""Columns that filters have of the clips and videos of samples: how many a sample has, and how long they are.

They come from the index alone. A dataset has those of the modalities that it was indexed with; a column of the same
name in a sidecar of any of its shards stands for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from dataserver.dataset.index.rules import read_rules
from dataserver.dataset.shards.modalities import AUDIO, VIDEO
from dataserver.planning.job.fields import MICROSECONDS

if TYPE_CHECKING:
    import pyarrow as pa

    from dataserver.dataset.index.numeric import ShardSizes


@dataclass(frozen=True, slots=True)
class _MediaColumn:
    """A column of clips or videos that filters may name."""

    modality: int
    """Number of the modality that it tells of."""
    rules: tuple[str, ...]
    """The rules of an index that give it, each of them; the first is the flag of `index` that is named for it."""
    pick: np.ufunc | None
    """Which of a sample's seconds it has; None where it has their number."""


MEDIA_COLUMNS: Final[Mapping[str, _MediaColumn]] = {
    name: _MediaColumn(modality.number, rules, pick)
    for modality, rules, one, several in (
        (AUDIO, ("audio", "video-sound"), "clip", "clips"),
        (VIDEO, ("video",), "video", "videos"),
    )
    for name, pick in (
        (several, None),
        (f"shortest_{one}_seconds", np.minimum),
        (f"longest_{one}_seconds", np.maximum),
    )
}
"""Columns of clips and videos by name."""


def media_columns(rules: str) -> dict[str, str]:
    """Return the names and Arrow types of the columns that an index by these rules has."""
    found = read_rules(rules)
    return {
        name: "int64" if column.pick is None else "double"
        for name, column in MEDIA_COLUMNS.items()
        if any(rule in found for rule in column.rules)
    }


def flag_of(name: str) -> str:
    """Return the flag of `index` that gives a column; empty where none does."""
    column = MEDIA_COLUMNS.get(name)
    return "" if column is None else f"--{column.rules[0]} serve"


def media_column(sizes: "ShardSizes", name: str) -> "pa.Array":
    """Return a column of `MEDIA_COLUMNS` of a shard with n samples.

    Returns:
        int64 [n], how many there are; or double [n], seconds, null where a sample has none.
    """
    import pyarrow as pa

    column = MEDIA_COLUMNS[name]
    is_of = np.zeros(len(sizes.image_width), np.bool_)
    if sizes.image_modality is not None:
        is_of = sizes.image_modality == column.modality
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_of)])[sizes.image_offsets]
    counts = np.diff(ends)
    if column.pick is None:
        return pa.array(counts)
    has_any = counts > 0
    found = np.zeros(len(counts))
    if has_any.any():
        found[has_any] = column.pick.reduceat(_seconds(sizes, column.modality)[is_of], ends[:-1][has_any])
    return pa.array(found, mask=~has_any)


def _seconds(sizes: "ShardSizes", modality: int) -> npt.NDArray[np.float64]:
    """Seconds of all clips, or of all videos; of the others something else. float64 [m]."""
    if modality == AUDIO.number:
        return sizes.image_width / sizes.image_height
    assert sizes.image_microseconds is not None  # where there is a video
    return sizes.image_microseconds / MICROSECONDS
