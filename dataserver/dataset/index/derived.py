"""Columns that transforms of users make of an index, which filters may name: a file a shard and transform, beside it.

Each transform sees the columns of the index, never those of another one. A column `keep` leaves samples out where it is
false. A file names the transform and the digest of the index columns that it was made of: others count as missing.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from dataserver.dataset.errors import DatasetError, TokensMissingError, check_storage, printable
from dataserver.dataset.filters import ColumnSource
from dataserver.dataset.index.flags import index_command, transform_flags
from dataserver.dataset.index.format import (
    COLUMNS_KEY,
    META_PREFIX,
    IndexHeader,
    arrow_writer,
    read_columns,
    read_table,
)
from dataserver.dataset.index.fresh import read_fresh_index
from dataserver.dataset.index.numeric import IMAGE_COLUMNS, read_numeric
from dataserver.dataset.index.parts import WHOLE, Part
from dataserver.dataset.progress import Progress, told, untold
from dataserver.dataset.shards.listing import ShardFile, find_shards
from dataserver.planning.job.fields import InstalledTransform, is_name
from dataserver.transforms import TransformFailedError, TransformPool, TransformUnavailableError

if TYPE_CHECKING:
    import pyarrow as pa

KEEP: Final = "keep"
TRANSFORM_KEY: Final = b"disttrain.transform"
MAX_COLUMNS: Final = 64


@dataclass(frozen=True, slots=True)
class DeriveReport:
    """What a run found: `num_made` of `num_shards` were transformed now; `num_left_out` samples of all are not kept."""

    num_shards: int
    num_made: int
    num_left_out: int


def derive_columns(
    path: Path,
    pool: TransformPool,
    wanted: InstalledTransform,
    index_dir: Path | None = None,
    progress: Progress = untold,
    part: Part = WHOLE,
) -> DeriveReport:
    """Apply a transform of metadata to every shard of the dataset at `path`, where that is not done yet.

    Args:
        path: folder of indexed shards, or one shard.
        pool: has the transform.
        wanted: name, version and options.
        index_dir: where the indexes lie instead of beside the shards.
        progress: called with (shards done, shards in total).
        part: the shards that are transformed here.

    Raises:
        StaleIndexError: a shard is not indexed.
        DatasetError: the transform failed or returned columns that no filter could name, or a file cannot be written.
    """
    shards = part.of(find_shards(path, index_dir))
    num_made = num_left_out = 0
    for file in told(shards, progress):
        indexed = read_fresh_index(file)
        try:
            table = read_derived(file, indexed.header, wanted.key())
        except TokensMissingError:
            table = derive_table(file, indexed.header, indexed.columns, pool, wanted)
            _write(file, indexed.header, wanted.key(), table)
            num_made += 1
        num_left_out += int(np.count_nonzero(~_stays(table)))
    return DeriveReport(len(shards), num_made, num_left_out)


def read_derived(file: ShardFile, header: IndexHeader, key: str) -> "pa.Table":
    """Read what a transform made of a shard.

    Args:
        file: the shard.
        header: of its index.
        key: of the transform (`InstalledTransform.key`).

    Raises:
        TokensMissingError: the shard was not transformed, or before it was indexed again; names the command to run.
        ShardReadError: storage failed.
    """
    import pyarrow as pa

    path = file.derived_path(key)
    try:
        table = read_table(path)
        metadata = table.schema.metadata or {}
        same = metadata.get(COLUMNS_KEY), metadata.get(TRANSFORM_KEY)
        _check(table, header.num_samples, set())
    except FileNotFoundError as error:
        raise _missing(file, key, "was not transformed") from error
    except (OSError, pa.ArrowException, ValueError) as error:
        check_storage(path, error)
        raise _missing(file, key, f"has a file that cannot be read ({printable(str(error))})") from error
    if same != (header.columns_digest.encode(), key.encode()):
        raise _missing(file, key, "was transformed before it was indexed again")
    return table


def derived_digest(table: "pa.Table") -> bytes:
    """SHA-256 of the columns that a transform made: their names, types and values, however a file has them."""
    digest = hashlib.sha256()
    for name, column in zip(table.column_names, table.columns, strict=True):
        digest.update(json.dumps([name, str(column.type), len(column)]).encode())
        for part in _buffers(column):
            digest.update(part)
    return digest.digest()


def _buffers(column: "pa.ChunkedArray") -> Iterator[bytes]:
    """Which values are there, and what they are; nulls count as zeros."""
    import pyarrow as pa
    import pyarrow.compute as pc

    yield column.is_valid().to_numpy().tobytes()
    if not pa.types.is_string(column.type):
        yield column.fill_null(pa.scalar(0).cast(column.type)).to_numpy().tobytes()
        return
    filled = column.fill_null("")
    yield pc.binary_length(filled).to_numpy().tobytes()
    yield "".join(filled.to_pylist()).encode()


def _missing(file: ShardFile, key: str, reason: str) -> TokensMissingError:
    return TokensMissingError(
        f"shard {file.path} {reason} by the transform of metadata {key}; run: {index_command(file)} "
        f"{transform_flags(key)}"
    )


def derive_table(
    file: ShardFile, header: IndexHeader, columns: Mapping[str, str], pool: TransformPool, wanted: InstalledTransform
) -> "pa.Table":
    """What a transform makes of a shard. Raises DatasetError where it fails, or no filter could name its columns."""
    try:
        found = pool.metadata(_visible(file, header, columns), wanted)
        _check(found, header.num_samples, {*columns, *IMAGE_COLUMNS})
    except (TransformFailedError, TransformUnavailableError, ValueError) as error:
        raise DatasetError(
            f"shard {file.path}: {printable(str(error), 500)}; mend the transform, or its options"
        ) from error
    return found.replace_schema_metadata(None)


def _visible(file: ShardFile, header: IndexHeader, columns: Mapping[str, str]) -> "pa.Table":
    """What a transform sees of a shard: a row for each sample."""
    import pyarrow as pa

    batch = read_columns(file.index_path, header, ["key", "texts", *(META_PREFIX + name for name in columns)])
    key, texts, *of_sidecar = batch.columns
    sizes = read_numeric(file.index_path, header)
    found = {"key": key, "texts": texts, **{name: sizes.of_first_images(name) for name in IMAGE_COLUMNS}}
    others = {n: values for n, values in zip(columns, of_sidecar, strict=True) if n not in ("key", "texts")}
    return pa.table({**found, **others})


def _check(table: "pa.Table", num_samples: int, taken: Collection[str]) -> None:
    """Raise ValueError where a table has columns that no filter could name or compare."""
    import pyarrow as pa

    if table.num_rows != num_samples or table.num_columns > MAX_COLUMNS:
        raise ValueError(
            f"it returned {table.num_rows} rows and {table.num_columns} columns; {num_samples} rows and at most "
            f"{MAX_COLUMNS} columns are required"
        )
    names = table.column_names
    for name, kind in zip(names, table.schema.types, strict=True):
        if not is_name(name) or name in taken or names.count(name) > 1:
            raise ValueError(f"it returned the column {name[:80]!a}; a name that no other column has is required")
        if kind not in (pa.bool_(), pa.int64(), pa.float64(), pa.string()):
            raise ValueError(f"its column {name!r} is {kind}; bool, int64, double or string is required")
    if KEEP in names and (table.schema.field(KEEP).type != pa.bool_() or table.column(KEEP).null_count):
        raise ValueError(f"its column {KEEP!r} is {table.schema.field(KEEP).type}; bool without nulls is required")


def _write(file: ShardFile, header: IndexHeader, key: str, table: "pa.Table") -> None:
    table = table.replace_schema_metadata({COLUMNS_KEY: header.columns_digest, TRANSFORM_KEY: key})
    with arrow_writer(file.derived_path(key), table.schema) as writer:
        writer.write_table(table)


def _stays(table: "pa.Table") -> npt.NDArray[np.bool_]:
    if KEEP not in table.column_names:
        return np.ones(table.num_rows, np.bool_)
    found: npt.NDArray[np.bool_] = table.column(KEEP).to_numpy()
    return found


class DerivedColumns:
    """The columns of a shard with those that transforms made, for filters."""

    def __init__(self, shard: ColumnSource, tables: "Mapping[str, pa.Table]") -> None:
        """Join them.

        Args:
            shard: with the columns of its index.
            tables: what transforms made of it, by their keys.

        Raises:
            DatasetError: two transforms made columns of the same name.
        """
        self._shard = shard
        self._made: dict[str, pa.ChunkedArray] = {}
        self.made_by = dict[str, str]()
        """Key of the transform that made each column, by the column's name."""
        for key, table in tables.items():
            for name in table.column_names:
                if name == KEEP:
                    continue
                if name in self._made or name in shard.known_columns:
                    raise DatasetError(
                        f"several transforms of metadata, or one and the index, have the column {name!r}; rename it in "
                        "one of them"
                    )
                self._made[name], self.made_by[name] = table.column(name), key
        self.name, self.num_samples = shard.name, shard.num_samples
        self.columns = {**shard.columns, **{name: str(column.type) for name, column in self._made.items()}}
        self.known_columns = shard.known_columns | self._made.keys()
        self.stays = np.ones(shard.num_samples, np.bool_)
        """bool [num_samples]: False where a transform leaves the sample out."""
        for table in tables.values():
            self.stays &= _stays(table)

    def column(self, name: str) -> "pa.Array":
        """Return a derived column, or else the shard's own one."""
        return self._made[name].combine_chunks() if name in self._made else self._shard.column(name)
