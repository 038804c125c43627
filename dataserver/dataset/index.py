"""The index file of one shard: Arrow IPC, record batches of `BATCH_ROWS` samples, zstd buffers.

Numeric columns are read without decompressing the texts, and the texts of one row by decompressing one batch.
The schema's metadata holds the `IndexHeader` and the oddities, so that opening a dataset reads no column at all.
An index is stale where its format differs, or the content of the shard or of its sidecar.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from dataserver.dataset.errors import DatasetError, Oddities, Oddity, OddityReport, StaleIndexError
from dataserver.dataset.kinds import KINDS
from dataserver.dataset.samples import Sample

FORMAT_VERSION: Final = 2
BATCH_ROWS: Final = 256
META_PREFIX: Final = "meta."
NO_SIDECAR: Final = -1

TEMP_SUFFIX: Final = ".tmp"
TEMP_LIFETIME_S: Final = 600.0
"""A temporary file is written within seconds; an older one was left by a killed process and is swept."""

IMAGE_TYPE: Final = pa.struct(
    [
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("orientation", pa.uint8()),
        ("format", pa.uint8()),
    ]
)
CORE_SCHEMA: Final = pa.schema(
    [
        ("key", pa.string()),
        ("kinds", pa.list_(pa.uint8())),
        ("text_bytes", pa.list_(pa.int32())),
        ("texts", pa.list_(pa.string())),
        ("images", pa.list_(IMAGE_TYPE)),
    ]
)
HEADER_KEY: Final = b"disttrain.header"
ODDITIES_KEY: Final = b"disttrain.oddities"


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """What an index says about its shard as a whole."""

    format_version: int
    shard_bytes: int
    sidecar_bytes: int
    """Size of the parquet, `NO_SIDECAR` where there is none."""
    sha256: str
    """Of the shard's bytes, hex."""
    sidecar_sha256: str
    """Of the parquet's bytes, hex; empty where there is none."""
    columns_digest: str
    """sha256 over the logical values of all columns, hex."""
    num_samples: int


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
        images = [(i.offset, i.length, i.width, i.height, i.orientation, i.format) for i in sample.images]
        self._digest.update(_canonical([sample.key, sample.kinds, sample.texts, images]))
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
            [[asdict(image) for image in row.images] for row in rows],
        ]
        arrays = [pa.array(c, field.type) for c, field in zip(columns, CORE_SCHEMA, strict=True)]
        self.batches.append(pa.record_batch(arrays, schema=CORE_SCHEMA))
        self._pending = []


def digest_columns(core_digest: str, meta: pa.Table) -> str:
    """Return the digest over the core columns and the sidecar columns: logical values, not file bytes."""
    digest = hashlib.sha256(core_digest.encode())
    for column in meta.column_names:
        values = meta.column(column)
        digest.update(_canonical([column, str(values.type)]))
        for start in range(0, len(values), BATCH_ROWS):
            digest.update(_canonical(values.slice(start, BATCH_ROWS).to_pylist()))
    return digest.hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def write_index(
    path: Path, header: IndexHeader, oddities: Oddities, batches: Sequence[pa.RecordBatch], meta: pa.Table
) -> None:
    """Write an index atomically."""
    details = [[o.key, o.kind, o.detail] for o in oddities.details]
    metadata = {
        HEADER_KEY: _canonical(asdict(header)),
        ODDITIES_KEY: _canonical({"counts": dict(sorted(oddities.counts.items())), "details": details}),
    }
    fields = [pa.field(META_PREFIX + name, meta.schema.field(name).type) for name in meta.column_names]
    schema = pa.schema([*CORE_SCHEMA, *fields], metadata)
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with atomic_writer(path) as temp, pa.ipc.new_file(str(temp), schema, options=options) as writer:
        start = 0
        for batch in batches:
            columns = [c.combine_chunks() for c in meta.slice(start, batch.num_rows).columns]
            writer.write_batch(pa.record_batch([*batch.columns, *columns], schema=schema))
            start += batch.num_rows


@contextlib.contextmanager
def atomic_writer(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; on success it is synced and renamed to `path`.

    Raises:
        DatasetError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep_temps(path)
        descriptor, name = tempfile.mkstemp(TEMP_SUFFIX, f".{path.name}.", path.parent)
        try:
            yield Path(name)
            os.fchmod(descriptor, 0o644)
            os.fsync(descriptor)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        _sync_folder(path.parent)
    except OSError as error:
        raise DatasetError(
            f"cannot write {path}: {error}; make the folder writable and the disk large enough,"
            " or name a writable folder with --index-dir"
        ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_temps(path: Path) -> None:
    """Remove what killed writers of `path` left behind; the files of running ones are newer and stay."""
    with os.scandir(path.parent) as entries:
        for entry in entries:
            if entry.name.startswith(f".{path.name}.") and entry.name.endswith(TEMP_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat().st_mtime < time.time() - TEMP_LIFETIME_S:
                        Path(entry.path).unlink()


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield (source, reader) of an index; what cannot be parsed is a StaleIndexError."""
    try:
        with pa.memory_map(str(path)) as source:
            yield source, pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(use_threads=False))
    except (OSError, pa.ArrowException, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StaleIndexError(f"{path} cannot be read ({error}); remove it and index again") from error


@contextlib.contextmanager
def _open_columns(path: Path, header: IndexHeader, columns: Sequence[str]) -> Iterator[Any]:
    """Yield a reader of some columns, after checking that the file still is the one whose header was read."""
    with _open(path) as (source, reader):
        if (reader.schema.metadata or {}).get(HEADER_KEY) != _canonical(asdict(header)):
            raise ValueError("another index was written since the dataset was opened; open it again")
        included = [reader.schema.names.index(column) for column in columns]
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=included)
        yield pa.ipc.open_file(source, options=options)


def read_schema(path: Path) -> tuple[IndexHeader, dict[str, str]]:
    """Return the header and the sidecar columns (name -> type) of an index; reads no column.

    Raises:
        StaleIndexError: the file is missing, damaged or of another format version.
    """
    with _open(path) as (_, reader):
        schema = reader.schema
        fields = json.loads((schema.metadata or {}).get(HEADER_KEY, b"{}"))
        version = fields.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"it has format version {version}, this program reads {FORMAT_VERSION}")
        meta = [field for field in schema if field.name.startswith(META_PREFIX)]
        return IndexHeader(**fields), {f.name.removeprefix(META_PREFIX): str(f.type) for f in meta}


def read_oddities(path: Path) -> OddityReport:
    """Return what was odd in the shard of this index."""
    with _open(path) as (_, reader):
        content = json.loads(reader.schema.metadata[ODDITIES_KEY])
        details = tuple(Oddity(*detail) for detail in content["details"])
        if not KINDS.keys() >= content["counts"].keys() | {oddity.kind for oddity in details}:
            raise ValueError("it counts an unknown kind of oddity")
        return OddityReport(content["counts"], details)


def read_columns(path: Path, header: IndexHeader, columns: Sequence[str]) -> pa.Table:
    """Read whole columns; the buffers of the others are neither read nor decompressed.

    Raises:
        StaleIndexError: the index is damaged, or not the one that `header` was read from.
    """
    with _open_columns(path, header, columns) as reader:
        table = reader.read_all().combine_chunks()
        table.validate(full=True)
        return table


def read_batch(path: Path, header: IndexHeader, batch: int, columns: Sequence[str]) -> pa.RecordBatch:
    """Read columns of one record batch: rows `batch * BATCH_ROWS` and following; raises as `read_columns`."""
    with _open_columns(path, header, columns) as reader:
        rows = reader.get_batch(batch)
        rows.validate(full=True)
        return rows
