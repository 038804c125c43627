"""Indexing one shard: from its members and its sidecar to its index file."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

import pyarrow as pa

from dataserver.dataset.errors import DatasetError, Findings
from dataserver.dataset.index.columns import CORE_SCHEMA, IMAGE_TYPE
from dataserver.dataset.index.format import (
    BATCH_ROWS,
    FINDINGS_KEY,
    FORMAT_VERSION,
    HEADER_KEY,
    META_PREFIX,
    NO_SIDECAR,
    IndexHeader,
    atomic_writer,
    canonical,
)
from dataserver.dataset.index.known import state_of, write_known
from dataserver.dataset.index.numeric import numeric_path, write_numeric
from dataserver.dataset.kinds import LOST_IMAGE
from dataserver.dataset.shards.listing import ShardFile
from dataserver.dataset.shards.samples import ImagePart, Sample, read_samples
from dataserver.dataset.shards.scalar_rows import ScalarRows
from dataserver.dataset.shards.sidecar import promised_images, read_sidecar
from dataserver.dataset.shards.tar import HashingReader, scan_members
from dataserver.dataset.storage.digests import digest_file
from dataserver.dataset.storage.etags import NOT_REGULAR


class RowCollector:
    """Turns samples into record batches as they come, so that a shard's texts are held once, as UTF-8."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.batches: list[pa.RecordBatch] = []
        self._pending: list[Sample] = []
        self._digest = hashlib.sha256()

    def add(self, sample: Sample) -> None:
        """Append one row."""
        self.keys.append(sample.key)
        self._pending.append(sample)
        self._digest.update(canonical([sample.key, sample.kinds, sample.texts, sample.images]))
        if len(self._pending) == BATCH_ROWS:
            self._flush()

    def finish(self) -> str:
        """Flush the last batch and return the digest of the core columns."""
        if self._pending:
            self._flush()
        return self._digest.hexdigest()

    def _flush(self) -> None:
        rows = self._pending
        columns = [
            [row.key for row in rows],
            [row.kinds for row in rows],
            [[len(text.encode()) for text in row.texts] for row in rows],
            [row.texts for row in rows],
        ]
        arrays = [pa.array(c, field.type) for c, field in zip(columns, CORE_SCHEMA, strict=False)]
        arrays.append(_image_lists([row.images for row in rows]))
        self.batches.append(pa.record_batch(arrays, schema=CORE_SCHEMA))
        self._pending = []


def _image_lists(rows: Sequence[Sequence[ImagePart]]) -> pa.ListArray:
    """The column of images, put together field by field: Arrow takes far longer for dictionaries."""
    columns = [*zip(*(image for images in rows for image in images), strict=True)] or [()] * IMAGE_TYPE.num_fields
    fields = [pa.array(column, field.type) for column, field in zip(columns, IMAGE_TYPE, strict=True)]
    ends = pa.array(accumulate(map(len, rows), initial=0), pa.int32())
    images = pa.StructArray.from_arrays(fields, fields=[*IMAGE_TYPE])
    return pa.ListArray.from_arrays(ends, images, CORE_SCHEMA.field("images").type)


def digest_columns(core_digest: str, meta: pa.Table) -> str:
    """Return the digest over the core columns and the sidecar columns: logical values, not file bytes."""
    digest = hashlib.sha256(core_digest.encode())
    for column in meta.column_names:
        values = meta.column(column)
        digest.update(canonical([column, str(values.type)]))
        for start in range(0, len(values), BATCH_ROWS):
            digest.update(canonical(values.slice(start, BATCH_ROWS).to_pylist()))
    return digest.hexdigest()


def write_index(
    path: Path, header: IndexHeader, findings: Findings, batches: Sequence[pa.RecordBatch], meta: pa.Table
) -> str:
    """Write an index atomically, and its numeric columns once more beside it; why not, where that is impossible."""
    details = [[o.key, o.kind, o.detail] for o in findings.details]
    metadata = {
        HEADER_KEY: canonical(asdict(header)),
        FINDINGS_KEY: canonical({"counts": dict(sorted(findings.counts.items())), "details": details}),
    }
    fields = [pa.field(META_PREFIX + name, meta.schema.field(name).type) for name in meta.column_names]
    schema = pa.schema([*CORE_SCHEMA, *fields], metadata)
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with (
        atomic_writer(path) as temp,
        pa.OSFile(os.fsencode(temp), "w") as file,  # of a text pyarrow makes UTF-8, which not every name is
        pa.ipc.new_file(file, schema, options=options) as writer,
    ):
        numeric_path(path).unlink(missing_ok=True)  # of the index before: a build that is killed would leave it
        start = 0
        for batch in batches:
            columns = [c.combine_chunks() for c in meta.slice(start, batch.num_rows).columns]
            writer.write_batch(pa.record_batch([*batch.columns, *columns], schema=schema))
            start += batch.num_rows
    return write_numeric(path, header)


def index_shard(shard: ShardFile) -> str:
    """Index one shard in one sequential pass; why a file beside the index was not written, where that is impossible.

    Raises:
        DatasetError: the shard cannot be read, changes meanwhile, or the index cannot be written.
    """
    findings = Findings()
    rows = RowCollector()
    scalars = ScalarRows()
    without_image: list[int] = []
    try:
        etag, sidecar = before = shard.settled_etags()
        with shard.storage.open(shard.path) as file:
            reader = HashingReader(file, etag.num_bytes)
            for sample in read_samples(scan_members(reader, findings), findings):
                rows.add(sample)
                scalars.add(sample.scalars, findings)
                if not sample.images:
                    without_image.append(len(rows.keys) - 1)
            reader.skip(reader.remaining)
        core_digest = rows.finish()
        meta = read_sidecar(shard.sidecar_path, rows.keys, scalars.rows, findings)
        for row, size in promised_images(without_image, meta, scalars.rows):
            findings.add(rows.keys[row], LOST_IMAGE, f"the sidecar gives {size}, the tar has no image; served as text")
        has_content = sidecar is not None and sidecar.num_bytes != NOT_REGULAR
        sidecar_sha256 = digest_file(shard.sidecar_path) if has_content else ""
        after = shard.etags()
    except OSError as error:
        raise DatasetError(f"cannot read shard {shard.path}: {error}; make it readable and index again") from error
    if before != after:
        raise DatasetError(f"shard {shard.path} changed while it was indexed; index again when it is complete")
    header = IndexHeader(
        format_version=FORMAT_VERSION,
        shard_bytes=etag.num_bytes,
        sidecar_bytes=sidecar.num_bytes if sidecar else NO_SIDECAR,
        sha256=reader.hexdigest(),
        sidecar_sha256=sidecar_sha256,
        columns_digest=digest_columns(core_digest, meta),
        num_samples=len(rows.keys),
    )
    problem = write_index(shard.index_path, header, findings, rows.batches, meta)
    return problem or write_known(shard.index_path, header, state_of(before))
