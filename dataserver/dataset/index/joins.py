"""Which files are joined to a shard, and whether its index was made of them as they are now.

What joined files bring lies in the index, all but the bytes of images, and a fingerprint covers it. A line of JSON
beside the index has the paths, sizes and times of the files: `dataserver index` compares them, and servers find there
where images lie.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dataserver.dataset.errors import DatasetError, Findings
from dataserver.dataset.index.format import IndexHeader, read_joined
from dataserver.dataset.index.notes import read_note, write_note
from dataserver.dataset.kinds import MISSING_PARTNER
from dataserver.dataset.shards.formats import FORMATS, format_of
from dataserver.dataset.shards.listing import ShardFile
from dataserver.dataset.shards.unread import remedy_of
from dataserver.dataset.storage.registry import storage_of

JOINED_SUFFIX: Final = ".joined"
PARQUET_SUFFIX: Final = ".parquet"
MOST_TABLE_FILES: Final = 1024
"""Files of all tables together: each is noted beside the index of every shard."""
_MAX_BYTES: Final = 64 << 20
NO_MANIFEST: Final = "manifests are not joined; write what they say as Parquet, with the keys of samples as column key"
NO_SHARD: Final = "no shard has this name: nothing of the file is joined"
State = list[list[Any]]
"""Path, size, mtime and ctime (nanoseconds) of each joined file."""


@dataclass(frozen=True, slots=True)
class ShardJoins:
    """What is joined to one shard, as it was found on the machine that the command runs on.

    Another machine that indexes the shard fails where it does not see these files, instead of leaving them out.
    """

    files: tuple[Path, ...] = ()
    """Files of the shard's name, in the order of the folders."""
    missing: tuple[Path, ...] = ()
    """Folders without a file for the shard."""
    tables: tuple[tuple[Path, ...], ...] = ()
    table_state: State = field(default_factory=list)
    """State of the files of tables, before any shard was read."""

    def state(self) -> State:
        """Return the state of all joined files, those of the tables as they were. Raises OSError."""
        return [*state_of_joined(self.files), *self.table_state]

    def report_missing(self, findings: Findings) -> None:
        """Count each folder without a file for the shard."""
        for folder in self.missing:
            detail = f"{folder} has no file of this name: what is joined from there lacks for all samples"
            findings.add("", MISSING_PARTNER, f"{detail} of the shard")


@dataclass(frozen=True, slots=True)
class Joins:
    """What is joined to the shards of a dataset; all paths are absolute."""

    folders: tuple[Path, ...] = ()
    """Their files are named as the shards."""
    tables: tuple[tuple[Path, ...], ...] = ()
    """Parquet files that cover several shards; those of one entry have rows of one table."""
    files: Mapping[str, Mapping[Path, tuple[Path, ...]]] = field(default_factory=dict)
    """Files that join a shard, by its name and by folder."""

    def table_state(self) -> State:
        """Return the state of the files of tables. Raises DatasetError where one cannot be reached."""
        try:
            return state_of_joined([path for table in self.tables for path in table])
        except OSError as error:
            raise DatasetError(f"a joined file cannot be reached: {error}; check the storage") from error

    def of(self, shard: ShardFile, table_state: State) -> ShardJoins:
        """Return what is joined to a shard; `table_state` is what the method of that name returned."""
        by_folder = self.files.get(shard.name, {})
        return ShardJoins(
            tuple(path for folder in self.folders for path in by_folder.get(folder, ())),
            tuple(folder for folder in self.folders if not by_folder.get(folder)),
            self.tables,
            table_state,
        )


def find_joins(root: Path, shards: Sequence[ShardFile], paths: Sequence[Path]) -> Joins:
    """Return what the paths of --join hold for the shards of a dataset.

    Args:
        root: of the dataset.
        shards: all of them, also those that other machines index.
        paths: folders, or Parquet files.

    Raises:
        DatasetError: a path is named twice, lies in the dataset's own folders, has nothing for any shard, or cannot be
            read.
    """
    try:
        return _find_joins(root, shards, paths)
    except OSError as error:
        raise DatasetError(f"--join cannot be read: {error}; check the storage") from error


def _find_joins(root: Path, shards: Sequence[ShardFile], paths: Sequence[Path]) -> Joins:
    own = {(root / folder).resolve() for shard in shards for folder in Path(shard.name).parents} if paths else set()
    named = [path.resolve() for path in paths]
    if len({*named}) < len(paths) or any(path in own or (path.is_file() and path.parent in own) for path in named):
        raise DatasetError(
            f"--join names a folder twice, or the dataset's own ({root}), or something in it;"
            " name other folders or files, each once"
        )
    folders, tables = [], []
    files: dict[str, dict[Path, tuple[Path, ...]]] = {}
    for path in named:
        found = _files_by_shard(path, shards) if path.is_dir() else {}
        table = _table_files(path)
        if found:
            folders.append(path)
            for name, partners in found.items():
                files.setdefault(name, {})[path] = partners
        elif 0 < len(table) <= MOST_TABLE_FILES:
            tables.append(table)
        else:
            raise DatasetError(
                f"--join {path} has no file for any of the {len(shards)} shards; a folder is required whose tars or"
                f" parquet files have the names of the shards, such as {path / shards[0].name}, or 1 to"
                f" {MOST_TABLE_FILES} parquet files whose rows have the keys of all samples"
            )
    num_files = sum(map(len, tables))
    if num_files > MOST_TABLE_FILES:
        raise DatasetError(
            f"the tables of --join have {num_files} parquet files, limit {MOST_TABLE_FILES} in all; merge some of them"
        )
    return Joins(tuple(folders), tuple(tables), files)


def _files_by_shard(folder: Path, shards: Sequence[ShardFile]) -> dict[str, tuple[Path, ...]]:
    """The files of a folder for each shard that has any: of its name, with the suffix of any format. Raises OSError.

    Each folder is listed once: to ask for every name would take far longer over a network.
    """
    suffixes = [found.suffix for found in FORMATS if not found.has_external]
    listed: dict[Path, set[str]] = {}
    by_shard = {}
    for shard in shards:
        stem = folder / shard.name.removesuffix(shard.format.suffix)
        if stem.parent not in listed:
            listed[stem.parent] = _names_in(stem.parent)
        names = listed[stem.parent]
        if found := tuple(stem.parent / name for s in suffixes if (name := stem.name + s) in names):
            by_shard[shard.name] = tuple(path for path in found if _is_file(path))
    return {name: found for name, found in by_shard.items() if found}


def _names_in(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def _is_file(path: Path) -> bool:
    """Whether a listed path is a file. Raises OSError for a link to what is not there, as where a mount is missing."""
    path.stat()
    return path.is_file()


def _table_files(path: Path) -> tuple[Path, ...]:
    if path.is_dir():
        return tuple(sorted(found for found in path.iterdir() if found.suffix == PARQUET_SUFFIX and _is_file(found)))
    return (path,) if path.suffix == PARQUET_SUFFIX and path.is_file() else ()


def unread_files(joins: Joins, paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """Return the files in joined folders that look like partners and are not joined, in the order of names, each with
    why, or what helps."""
    used = {path for table in joins.tables for path in table}
    used |= {path for by_folder in joins.files.values() for found in by_folder.values() for path in found}
    found = (path for folder in paths if folder.is_dir() for path in sorted(folder.resolve().rglob("*")))
    return [(path, why) for path in found if path not in used and (why := _why_unread(path))]


def _why_unread(path: Path) -> str:
    """Why a file that looks like a partner is not joined; nothing of any other one."""
    found = format_of(path.name)
    why = NO_MANIFEST if path.suffix == ".jsonl" else remedy_of(path.name)
    if found is not None and not found.has_external:
        why = NO_SHARD
    return why if why and path.is_file() else ""


def state_of_joined(paths: Sequence[Path]) -> State:
    """Return absolute paths, sizes and times of joined files. Raises OSError.

    Files of two folders may have the same names, sizes and times.
    """
    found = []
    for path in paths:
        etag = storage_of(path).etag(str(path))
        found.append([str(path), etag.num_bytes, etag.mtime_ns, etag.ctime_ns])
    return found


def read_state(shard: ShardFile, header: IndexHeader) -> State:
    """Return what was noted of the joined files when the shard was indexed.

    Raises OSError, or ValueError where the note is damaged or was made with another index.
    """
    return _read(shard, header)[0]


def found_joined(shard: ShardFile, header: IndexHeader, number: int) -> tuple[Path, tuple[int, int, int]]:
    """Return where a joined file lies now, and its size, mtime and ctime (nanoseconds) when the shard was indexed.

    It lies where it was indexed, or else as it did relative to the dataset, where both were moved or mounted elsewhere.

    Args:
        shard: the shard.
        header: of its index.
        number: of the file among all that are joined to the shard, from 1.

    Raises OSError, LookupError, or ValueError, as `read_state`.
    """
    state, root = _read(shard, header)
    noted, num_bytes, mtime_ns, ctime_ns = state[number - 1]
    path = Path(noted)
    if root and not path.exists():
        moved = Path(os.path.normpath(shard.root.resolve() / os.path.relpath(path, root)))
        path = moved if moved.exists() else path
    return path, (num_bytes, mtime_ns, ctime_ns)


def known_digests(shard: ShardFile, header: IndexHeader, state: State) -> dict[Path, str]:
    """Return the SHA-256 of joined files that are as they were when the shard was indexed, where the index has it.

    Args:
        shard: the shard.
        header: of its index, made by any rules.
        state: of the files that are joined now.
    """
    try:
        before = read_state(shard, header)
        files = {one.number: one.sha256 for one in read_joined(shard.index_path, header)}
    except (OSError, ValueError):  # also one that is stale
        return {}
    numbered = ((number, entry) for number, entry in enumerate(before, 1) if entry in state)
    return {Path(entry[0]): files[number] for number, entry in numbered if number in files}


def _read(shard: ShardFile, header: IndexHeader) -> tuple[State, str]:
    """The state that was noted, and the folder of the dataset at that time; no folder in older notes."""
    path = _path(shard)
    noted = read_note(path, _MAX_BYTES)
    # the first version wrote a list alone, which names no index
    if not isinstance(noted, dict) or noted.get("columns_digest") != header.columns_digest:
        raise ValueError(f"{path} belongs to another index; index again")
    files, root = noted.get("files"), noted.get("root", "")
    if not isinstance(files, list) or any(not _is_entry(entry) for entry in files) or not isinstance(root, str):
        raise ValueError(f"{path} is damaged; index again")
    return files, root


def _is_entry(entry: object) -> bool:
    return isinstance(entry, list) and [*map(type, entry)] == [str, int, int, int]


def are_as_joined(shard: ShardFile, header: IndexHeader, joins: ShardJoins) -> bool:
    """Whether the index of a shard was made of the joined files as they are now."""
    try:
        before = read_state(shard, header)
    except FileNotFoundError:
        before = []
    except (OSError, ValueError, RecursionError):
        return False
    return before == joins.state()


def write_joined(shard: ShardFile, header: IndexHeader, state: State) -> None:
    """Note of what an index was made. Raises DatasetError where it cannot be written, or is too long."""
    path = _path(shard)
    if not state:
        path.unlink(missing_ok=True)
        return
    root = str(shard.root.resolve()) if shard.storage.is_local else ""
    text = json.dumps({"columns_digest": header.columns_digest, "files": state, "root": root}) + "\n"
    if len(text) > _MAX_BYTES:
        raise DatasetError(
            f"the paths of {len(state)} joined files take {len(text)} bytes, limit {_MAX_BYTES}; join fewer files"
        )
    write_note(path, text.encode("ascii"))


def _path(shard: ShardFile) -> Path:
    return shard.index_path.with_suffix(JOINED_SUFFIX)
