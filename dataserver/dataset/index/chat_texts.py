"""The conversations of a shard's samples, as a column of its index."""

import pyarrow as pa

from dataserver.dataset.errors import DatasetError
from dataserver.dataset.index.chat_counts import CHAT_COLUMN
from dataserver.dataset.shards.captions import MAX_CAPTION_BYTES
from dataserver.dataset.shards.listing import ShardFile


class ChatTexts:
    """Collects conversations row by row, as JSON."""

    def __init__(self) -> None:
        self._rows: list[str] = []
        self._num_bytes = 0

    def add(self, chat: str) -> None:
        """Append the conversation of a sample."""
        self._rows.append(chat)
        self._num_bytes += len(chat.encode())
        if self._num_bytes > MAX_CAPTION_BYTES:
            raise DatasetError(
                f"conversations of a shard have more than {MAX_CAPTION_BYTES} bytes; make smaller shards"
            )

    def added_to(self, meta: pa.Table, shard: ShardFile) -> pa.Table:
        """Return the columns of a shard with that of its conversations. Raises DatasetError where one is called so."""
        if CHAT_COLUMN in meta.column_names:
            raise DatasetError(
                f"{shard.sidecar_path or shard.path} has a column {CHAT_COLUMN!r}, as conversations are stored; "
                "rename it, or index without --conversations chat"
            )
        columns = dict(zip(meta.column_names, meta.columns, strict=True))  # a table without columns has no rows
        columns[CHAT_COLUMN] = pa.chunked_array([pa.array(self._rows, pa.string())])
        return pa.table(columns)
