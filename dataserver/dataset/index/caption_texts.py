"""The named captions of a shard's samples, as columns of its index."""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from dataserver.dataset.errors import DatasetError, Findings
from dataserver.dataset.kinds import MISSING_NAMED_CAPTION
from dataserver.dataset.shards.captions import MAX_CAPTION_BYTES, PARQUET, CaptionSource
from dataserver.dataset.shards.listing import ShardFile
from dataserver.dataset.shards.members import usable_caption
from dataserver.dataset.shards.samples import Sample


class CaptionTexts:
    """Collects captions row by row. Documents have none: their texts are parts of them."""

    def __init__(self, sources: Sequence[CaptionSource]) -> None:
        self._sources = sources
        self._rows: list[Mapping[str, str] | None] = []
        """Captions of each sample by name; None for documents."""
        self._num_bytes = 0

    def add(self, sample: Sample) -> None:
        """Append the captions of a sample."""
        if not self._sources:
            return
        self._rows.append(sample.captions)
        self._num_bytes += sum(len(text.encode()) for text in (sample.captions or {}).values())
        if self._num_bytes > MAX_CAPTION_BYTES:
            raise DatasetError(
                f"named captions of a shard have more than {MAX_CAPTION_BYTES} bytes; make smaller shards"
            )

    def added_to(self, meta: pa.Table, keys: Sequence[str], shard: ShardFile, findings: Findings) -> pa.Table:
        """Return the columns of a shard with one more for each caption that a sample of it has.

        Args:
            meta: columns of the sidecar.
            keys: of the rows.
            shard: for messages.
            findings: samples that lack a caption are counted there.

        Raises:
            DatasetError: a column that is named as a caption holds no texts, or one is called as a caption would be.
        """
        if name := next((s.name for s in self._sources if s.column in meta.column_names), ""):
            raise DatasetError(
                f"{shard.sidecar_path or shard.path} has a column 'caption.{name}', as the caption {name!r} would be"
                " stored; give the caption another name"
            )
        columns = dict(zip(meta.column_names, meta.columns, strict=True))  # a table without columns has no rows
        for source in self._sources:
            texts = self._of(source, meta, shard)
            lacking = [row for row, text in enumerate(texts) if text is None and self._rows[row] is not None]
            if lacking:
                findings.add(
                    "",
                    MISSING_NAMED_CAPTION,
                    f"{len(lacking)} of {len(keys)} samples have no caption {source.name} ({source}), the first is"
                    f" {keys[lacking[0]]!a}; jobs that ask for it read their own text",
                )
            if any(text is not None for text in texts):
                columns[source.column] = pa.chunked_array([pa.array(texts, pa.string())])
        return pa.table(columns)

    def _of(self, source: CaptionSource, meta: pa.Table, shard: ShardFile) -> list[str | None]:
        given = [(captions or {}).get(source.name) for captions in self._rows]
        if source.part != PARQUET or source.field not in meta.column_names or any(given):
            return given
        column = meta.column(source.field)
        if column.type != pa.string():
            raise DatasetError(
                f"--caption {source.name}={source}: the column {source.field!r} of"
                f" {shard.sidecar_path or shard.path} is {column.type}; a column of texts is required"
            )
        found = zip(column.to_pylist(), self._rows, strict=True)
        return [None if row is None else usable_caption(text) for text, row in found]
