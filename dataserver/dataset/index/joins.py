"""Which files are joined to a shard, and whether its index was made of them as they are now.

What joined files bring lies in the index, all but the bytes of images, and a fingerprint covers it. A line of JSON
beside the index has the paths, sizes and times of the files: `dataserver index` compares them, and servers find there
where images lie.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dataserver.dataset.errors import DatasetError, Findings
from dataserver.dataset.index.format import atomic_writer
from dataserver.dataset.kinds import MISSING_PARTNER
from dataserver.dataset.shards.formats import FORMATS, format_of
from dataserver.dataset.shards.listing import ShardFile
from dataserver.dataset.storage.etags import check_regular
from dataserver.dataset.storage.registry import storage_of

JOINED_SUFFIX: Final = ".joined"
PARQUET_SUFFIX: Final = ".parquet"
MOST_TABLE_FILES: Final = 1024
_MAX_BYTES: Final = 1 << 20
State = list[list[Any]]


@dataclass(frozen=True, slots=True)
class Joins:
    """What is joined to the shards of a dataset."""

    folders: tuple[Path, ...] = ()
    """Their files are named as the shards."""
    tables: tuple[tuple[Path, ...], ...] = ()
    """Parquet files that cover several shards; those of one entry have rows of one table."""

    def files_of(self, shard: ShardFile) -> list[Path]:
        """Return the files in folders that bring more for a shard: of its name, with the suffix of any format."""
        stem = shard.name.removesuffix(shard.format.suffix)
        names = [stem + found.suffix for found in FORMATS if not found.has_external]
        return [path for folder in self.folders for path in (folder / name for name in names) if path.is_file()]

    def all_of(self, shard: ShardFile) -> list[Path]:
        """Return all files that are looked at for a shard: `files_of`, then those of tables."""
        return [*self.files_of(shard), *(path for table in self.tables for path in table)]

    def report_missing(self, shard: ShardFile, findings: Findings) -> None:
        """Count each folder without a file for a shard."""
        for folder in self.folders:
            if not Joins((folder,)).files_of(shard):
                detail = f"{folder} has no file of this name: what is joined from there lacks for all samples"
                findings.add("", MISSING_PARTNER, f"{detail} of the shard")


def find_joins(root: Path, shards: Sequence[ShardFile], paths: Sequence[Path]) -> Joins:
    """Return what the paths of --join hold for the shards of a dataset.

    Raises:
        DatasetError: a path is named twice, lies in the dataset's own folders, or has nothing for any shard.
    """
    own = {(root / folder).resolve() for shard in shards for folder in Path(shard.name).parents} if paths else set()
    named = {path.resolve() for path in paths}
    if len(named) < len(paths) or any(path in own or (path.is_file() and path.parent in own) for path in named):
        raise DatasetError(
            f"--join names a folder twice, or the dataset's own ({root}), or something in it;"
            " name other folders or files, each once"
        )
    by_name, tables = [], []
    for path in paths:
        table = _table_files(path)
        if path.is_dir() and any(Joins((path,)).files_of(shard) for shard in shards):
            by_name.append(path)
        elif 0 < len(table) <= MOST_TABLE_FILES:
            tables.append(table)
        else:
            raise DatasetError(
                f"--join {path} has no file for any of the {len(shards)} shards; a folder is required whose tars or"
                f" parquet files have the names of the shards, such as {path / shards[0].name}, or 1 to"
                f" {MOST_TABLE_FILES} parquet files whose rows have the keys of all samples"
            )
    return Joins(tuple(by_name), tuple(tables))


def _table_files(path: Path) -> tuple[Path, ...]:
    if path.is_dir():
        return tuple(sorted(found for found in path.iterdir() if found.suffix == PARQUET_SUFFIX and found.is_file()))
    return (path,) if path.suffix == PARQUET_SUFFIX and path.is_file() else ()


def unread_files(shards: Sequence[ShardFile], joins: Joins, paths: Sequence[Path]) -> list[Path]:
    """Return the files in joined folders that look like partners and are not joined, in the order of names."""
    used = {path for shard in shards for path in joins.all_of(shard)}
    found = (path for folder in paths if folder.is_dir() for path in sorted(folder.rglob("*")))
    return [path for path in found if path not in used and _may_be_partner(path)]


def _may_be_partner(path: Path) -> bool:
    found = format_of(path.name)
    return found is not None and not found.has_external and path.is_file()


def state_of_joined(paths: Sequence[Path]) -> State:
    """Return paths, sizes and times of joined files. Raises OSError.

    Files of two folders may have the same names, sizes and times.
    """
    found = []
    for path in paths:
        etag = storage_of(path).etag(str(path))
        found.append([str(path.resolve()), etag.num_bytes, etag.mtime_ns, etag.ctime_ns])
    return found


def read_state(shard: ShardFile) -> State:
    """Return what was noted of the joined files when the shard was indexed. Raises OSError or ValueError."""
    path = _path(shard)
    check_regular(path)
    with path.open("rb") as file:
        found = json.loads(file.read(_MAX_BYTES))
    for entry in found if isinstance(found, list) else [None]:
        if not (isinstance(entry, list) and [*map(type, entry)] == [str, int, int, int]):
            raise ValueError(f"{path} is damaged; index again")
    return found  # type: ignore[no-any-return]


def are_as_joined(shard: ShardFile, joins: Joins) -> bool:
    """Whether the index of a shard was made of the joined files as they are now."""
    try:
        before = read_state(shard)
    except FileNotFoundError:
        before = []
    except (OSError, ValueError, RecursionError):
        return False
    return before == state_of_joined(joins.all_of(shard))


def write_joined(shard: ShardFile, state: State) -> None:
    """Note of what an index was made. Raises DatasetError where it cannot be written."""
    path = _path(shard)
    if not state:
        path.unlink(missing_ok=True)
        return
    with atomic_writer(path) as temp:
        temp.write_text(f"{json.dumps(state)}\n", "ascii")


def _path(shard: ShardFile) -> Path:
    return shard.index_path.with_suffix(JOINED_SUFFIX)
