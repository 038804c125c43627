"""The index file of one shard: Arrow IPC, record batches of `BATCH_ROWS` samples, LZ4 buffers.

Zstandard would save a fifth of the bytes, and take ten times as long to read whole columns: it sets up a context for
each of the many small buffers. Indexes that have its buffers are read all the same.
Numeric columns are read without decompressing the texts, and the texts of one row by decompressing one batch.
The schema's metadata holds the `IndexHeader` and the findings, so that opening a dataset reads no column at all.
An index is stale where its format differs, or the content of the shard or of its sidecar. `indexing.py` writes it.

Arrow takes as long to load as gRPC. Here and in the modules that read the other files it is imported where it is used,
so that it costs a server nothing until a job's sizes are read.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from dataserver.dataset.errors import DatasetError, FindingReport, StaleIndexError, canonical, check_storage, printable
from dataserver.dataset.index.rules import read_rules
from dataserver.dataset.kinds import DROPPED_IMAGE, MISSING_CAPTION, UNUSED_PART
from dataserver.dataset.shards.captions import PARQUET
from dataserver.dataset.shards.documents import DOCUMENT_FORMS
from dataserver.dataset.shards.pages import PageTable, decode_pages
from dataserver.dataset.shards.parts import JoinedFile
from dataserver.dataset.storage.etags import check_regular
from dataserver.dataset.storage.pieces import BLOCK_BYTES
from dataserver.images import FORMAT_NAMES
from dataserver.outputs import TEMP_LIFETIME_S, TEMP_SUFFIX, beside

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT_VERSION: Final = 3
MAX_TABLE_BYTES: Final = 1 << 30
"""Largest file of token counts, or of columns that a transform made."""
BATCH_ROWS: Final = 256
META_PREFIX: Final = "meta."
"""Stands before the names of columns that come from a sidecar."""
NO_SIDECAR: Final = -1

COLUMNS_KEY: Final = b"disttrain.columns_digest"
"""Where files beside an index have the digest of the columns that they were made of."""
HEADER_KEY: Final = b"disttrain.header"
FINDINGS_KEY: Final = b"disttrain.findings"
PAGES_KEY: Final = b"disttrain.pages"
"""Where the index of a shard with compressed pages has their table."""
JOINED_KEY: Final = b"disttrain.joined"
"""Where the index of a shard with images in joined files has a list of these."""
FORMATS_KEY: Final = b"disttrain.images"
"""Where an index has the names of the image formats that were read when it was made."""
DOCUMENTS_KEY: Final = b"disttrain.documents"
"""The same of the forms of documents."""
TEXTS_KEY: Final = b"disttrain.texts"
"""The same of where the text of a pair may lie."""
READ_IMAGES: Final = f"{' '.join(FORMAT_NAMES)} mif1"
"""What is read as an image; AVIF in files of the general brand, too."""
READ_TEXTS: Final = "members columns"
_COLUMN_CAPTION: Final = f"={PARQUET}:"
"""What a caption of a column has in rules."""
SUMS_KEY: Final = b"disttrain.block_crc32c"
"""Where an index has the CRC-32C of each block of `BLOCK_BYTES` of its shard, four bytes each, little-endian."""
EXTERNAL_KEY: Final = b"disttrain.external"
"""Where the index of a shard whose images lie in other files has the digest of these."""


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """What an index says about its shard as a whole."""

    format_version: int
    shard_bytes: int
    sidecar_bytes: int
    """Size of the parquet, `NO_SIDECAR` where there is none, `NOT_REGULAR` where something else has its name."""
    sha256: str
    """SHA-256 of the shard's bytes, hexadecimal."""
    sidecar_sha256: str
    """SHA-256 of the parquet's bytes, hexadecimal; empty where there is no parquet."""
    columns_digest: str
    """SHA-256 over the logical values of all columns, hexadecimal."""
    num_samples: int
    rules: str
    """Rules that made the samples, as `rules.written_rules` writes them."""
    has_images: bool
    """Whether the shard has an image, also in samples that were left out."""


@contextlib.contextmanager
def atomic_writer(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; on success it is synced and renamed to `path`.

    Raises:
        DatasetError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep_temps(path.parent)
        with beside(path) as temp:
            yield temp
    except OSError as error:
        raise DatasetError(
            f"cannot write {path}: {error}; make the folder writable and the disk large enough,"
            " or name a writable folder with --index-dir"
        ) from error


@contextlib.contextmanager
def arrow_writer(path: Path, schema: "pa.Schema", compression: str | None = None) -> Iterator[Any]:
    """Yield a writer of an Arrow file, which is there when all of it is written; raises as `atomic_writer`."""
    import pyarrow as pa

    with (
        atomic_writer(path) as temp,
        pa.OSFile(os.fsencode(temp), "w") as file,  # of a text pyarrow makes UTF-8, which not every name is
        pa.ipc.new_file(file, schema, options=pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)) as to,
    ):
        yield to


@cache
def _sweep_temps(folder: Path) -> None:
    """Remove what killed writers left behind in a folder; the files of running ones are newer and stay.

    Once in a process: a folder may hold several files of very many shards, and each is written.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(TEMP_SUFFIX):
                with contextlib.suppress(OSError):  # another process was quicker, or it is another user's
                    if entry.stat().st_mtime < time.time() - TEMP_LIFETIME_S:
                        Path(entry.path).unlink()


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield (source, reader) of an index; what cannot be parsed, or is no index, is a StaleIndexError.

    Raises:
        ShardReadError: storage failed.
    """
    import pyarrow as pa

    from dataserver.dataset.index.columns import check_schema

    try:
        check_regular(path)
        with pa.memory_map(os.fsencode(path)) as source:
            reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(use_threads=False))
            check_schema(reader.schema, META_PREFIX)
            yield source, reader
    except (OSError, pa.ArrowException, ValueError, TypeError, KeyError, AttributeError) as error:
        check_storage(path, error)
        raise StaleIndexError(f"{path} cannot be read ({printable(str(error))}); remove it and index again") from error


@contextlib.contextmanager
def _open_columns(path: Path, header: IndexHeader, columns: Sequence[str]) -> Iterator[Any]:
    """Yield a reader of some columns, after checking that the file is still the one whose header was read."""
    import pyarrow as pa

    with _open(path) as (source, reader):
        if (reader.schema.metadata or {}).get(HEADER_KEY) != canonical(asdict(header)):
            raise ValueError("another index was written since the dataset was opened; open it again")
        included = [reader.schema.names.index(column) for column in columns]
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=included)
        yield pa.ipc.open_file(source, options=options)


def read_schema(path: Path, any_rules: bool = False) -> tuple[IndexHeader, dict[str, str]]:
    """Return the header and the sidecar columns (name -> type) of an index; reads no column.

    Args:
        path: of the index.
        any_rules: also of one that another release made, whose samples may be others.

    Raises:
        StaleIndexError: the file is missing, damaged or of another format version, or of other rules.
    """
    with _open(path) as (_, reader):
        schema = reader.schema
        fields = json.loads((schema.metadata or {}).get(HEADER_KEY, b"{}"))
        version = fields.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"it has format version {version}, this program reads {FORMAT_VERSION}")
        header = IndexHeader(**fields)
        if any(type(fields[name]) is not kind for name, kind in IndexHeader.__annotations__.items()):
            raise ValueError(f"its header is {fields}")
        if not any_rules:
            read_rules(header.rules)
        if header.num_samples < 0 or reader.num_record_batches != -(-header.num_samples // BATCH_ROWS):
            raise ValueError(f"it holds {reader.num_record_batches} batches for {header.num_samples} samples")
        meta = [field for field in schema if field.name.startswith(META_PREFIX)]
        return header, {f.name.removeprefix(META_PREFIX): str(f.type) for f in meta}


def read_findings(path: Path) -> FindingReport:
    """Return what was odd in the shard of this index."""
    with _open(path) as (_, reader):
        return FindingReport.from_json(reader.schema.metadata[FINDINGS_KEY])


def lacks_formats(path: Path) -> bool:
    """Whether an index left out images for their format, documents for their form or pairs for want of a text, and
    more are read by now."""
    with _open(path) as (_, reader):
        metadata = reader.schema.metadata
        counts = FindingReport.from_json(metadata[FINDINGS_KEY]).counts
        has_columns = _COLUMN_CAPTION in read_rules(json.loads(metadata[HEADER_KEY])["rules"])["captions"]
    for key, first, now, kinds in (
        (FORMATS_KEY, b"jpeg png webp", READ_IMAGES, ("unreadable_header", UNUSED_PART, DROPPED_IMAGE)),
        (DOCUMENTS_KEY, b"", DOCUMENT_FORMS, ("missing_image", MISSING_CAPTION, DROPPED_IMAGE)),
        (TEXTS_KEY, b"", READ_TEXTS, (MISSING_CAPTION,) if has_columns else ()),
    ):
        if metadata.get(key, first).decode() != now and any(counts.get(kind) for kind in kinds):
            return True
    return False


def read_columns(path: Path, header: IndexHeader, columns: Sequence[str]) -> "pa.RecordBatch":
    """Read whole columns; the buffers of the others are neither read nor decompressed.

    Raises:
        StaleIndexError: the index is damaged, or not the one that `header` was read from.
    """
    import pyarrow as pa

    with _open_columns(path, header, columns) as reader:
        table = reader.read_all()
        whole = [column.combine_chunks() for column in table.columns]
        return _checked(pa.record_batch(whole, schema=table.schema), header.num_samples)


def read_batch(path: Path, header: IndexHeader, batch: int, columns: Sequence[str]) -> "pa.RecordBatch":
    """Read columns of one record batch: rows `batch * BATCH_ROWS` and following; raises as `read_columns`."""
    with _open_columns(path, header, columns) as reader:
        return _checked(reader.get_batch(batch), min(BATCH_ROWS, header.num_samples - batch * BATCH_ROWS))


def read_pages(path: Path, header: IndexHeader) -> PageTable:
    """Return the compressed pages of a shard; raises as `read_columns`."""
    with _open_columns(path, header, []) as reader:
        return decode_pages((reader.schema.metadata or {}).get(PAGES_KEY, b""), header.shard_bytes)


def read_joined(path: Path, header: IndexHeader) -> list[JoinedFile]:
    """Return the joined files that images of a shard lie in; raises as `read_columns`."""
    with _open_columns(path, header, []) as reader:
        found = json.loads((reader.schema.metadata or {}).get(JOINED_KEY, b"[]"))
        return [JoinedFile(int(number), int(num_bytes), str(sha256)) for number, num_bytes, sha256 in found]


def read_block_sums(path: Path, header: IndexHeader) -> npt.NDArray[np.uint32]:
    """Return the CRC-32C of each block of a shard, uint32 [blocks]; none in indexes of older releases. Raises as
    `read_columns`."""
    with _open_columns(path, header, []) as reader:
        found: bytes = (reader.schema.metadata or {}).get(SUMS_KEY, b"")
        if found and len(found) != 4 * -(-header.shard_bytes // BLOCK_BYTES):
            raise ValueError(f"it has {len(found)} bytes of checksums for {header.shard_bytes} of its shard")
        return np.frombuffer(found, "<u4")


def read_external_digest(path: Path, header: IndexHeader) -> str:
    """Return the digest of images in other files; empty where there is none. Raises as `read_columns`."""
    with _open_columns(path, header, []) as reader:
        digest: bytes = (reader.schema.metadata or {}).get(EXTERNAL_KEY, b"")
        return digest.decode()


def read_table(path: Path) -> "pa.Table":
    """Return the table of a small file beside an index; to map so small a one takes longer.

    Raises:
        OSError, pa.ArrowException, ValueError: it cannot be read, or is no sound table.
    """
    import pyarrow as pa

    check_regular(path)
    if (size := path.stat().st_size) > MAX_TABLE_BYTES:
        raise ValueError(f"it has {size} bytes, the limit is {MAX_TABLE_BYTES}")
    table = pa.ipc.open_file(pa.py_buffer(path.read_bytes())).read_all()
    table.validate(full=True)
    return table


def _checked(rows: "pa.RecordBatch", num_rows: int) -> "pa.RecordBatch":
    from dataserver.dataset.index.columns import check_rows

    rows.validate(full=True)
    check_rows(rows, num_rows)
    return rows
