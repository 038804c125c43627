"""What a file of token counts says of conversations beside the number of their tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

CHAT_COLUMN: Final = "conversation"
"""Name of the column of conversations among those of the sidecar."""
TARGET: Final = 1
IMAGE_ENTRY: Final = 2
FLAG_BITS: Final = 2
"""Bits below an id: it is a target, it stands for an image."""


@dataclass(frozen=True, slots=True, eq=False)
class ChatCounts:
    """What the file of counts says of n conversations beside the number of their tokens; all 0 where there are none."""

    images: npt.NDArray[np.int64]
    """int64 [n]: tokens that stand for images, clips and videos."""
    targets: npt.NDArray[np.int64]
    """int64 [n]: tokens that are learned."""
    end_offsets: npt.NDArray[np.int64]
    """int64 [n + 1]: first end of each conversation."""
    end_tokens: npt.NDArray[np.int64]
    """int64 [ends]: tokens up to the end of an answer."""
    end_images: npt.NDArray[np.int64]
    """int64 [ends]: those among them that stand for images."""
    end_targets: npt.NDArray[np.int64]
    """int64 [ends]: those that are learned."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the counts take in memory."""
        return sum(getattr(self, name).nbytes for name in self.__dataclass_fields__)


def chat_counts(table: "pa.Table") -> ChatCounts | None:
    """What the table of a file of counts says of conversations; None where it counts texts.

    Raises:
        ValueError: its columns contradict each other.
    """
    import pyarrow as pa

    if "ends" not in table.column_names:
        return None
    tokens, images, targets = (_integers(table.column(name)) for name in ("tokens", "images", "targets"))
    ends = table.column("ends").combine_chunks()
    if not (pa.types.is_list(ends.type) and pa.types.is_struct(ends.type.value_type)) or ends.null_count:
        raise ValueError(f"its ends are {ends.type} with {ends.null_count} missing, no lists of structures")
    flat = ends.flatten()
    end_tokens, end_images, end_targets = (_integers(flat.field(name)) for name in ("tokens", "images", "targets"))
    offsets = ends.offsets.to_numpy().astype(np.int64)
    offsets = offsets - offsets[:1]
    of = np.repeat(np.arange(len(tokens)), np.diff(offsets))
    for part, whole in ((end_tokens, tokens), (end_images, images), (end_targets, targets)):
        if (part > np.maximum(whole, 0)[of]).any() or part.min(initial=0) < 0 or len(part) != offsets[-1]:
            raise ValueError("an answer ends behind its conversation")
    if (images + targets > np.maximum(tokens, 0)).any() or min(images.min(initial=0), targets.min(initial=0)) < 0:
        raise ValueError("a conversation has more images and targets than tokens")
    return ChatCounts(images, targets, offsets, end_tokens, end_images, end_targets)


def _integers(column: Any) -> npt.NDArray[np.int64]:
    import pyarrow as pa

    if column.null_count or not pa.types.is_integer(column.type):
        raise ValueError(f"a column of counts is {column.type} with {column.null_count} missing, no integers")
    found: npt.NDArray[np.int64] = column.to_numpy(zero_copy_only=False).astype(np.int64, casting="safe")
    return found
