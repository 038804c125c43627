"""Which files are joined to a shard, and whether its index was made of them as they are now.

What joined files bring lies in the index, all but the bytes of images, and a fingerprint covers it. A line of JSON
beside the index has the paths, sizes and times of the files: `dataserver index` compares them, and servers find there
where images lie.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dataserver.dataset.errors import DatasetError, Findings
from dataserver.dataset.index.format import atomic_writer
from dataserver.dataset.kinds import MISSING_PARTNER
from dataserver.dataset.shards.formats import FORMATS
from dataserver.dataset.shards.listing import ShardFile
from dataserver.dataset.storage.etags import check_regular
from dataserver.dataset.storage.registry import storage_of

JOINED_SUFFIX: Final = ".joined"
PARQUET_SUFFIX: Final = ".parquet"
_MAX_BYTES: Final = 1 << 16
State = list[list[Any]]


def joined_files(shard: ShardFile, joins: Sequence[Path]) -> list[Path]:
    """Return the files that bring more for a shard: of its name in other folders, with the suffix of any format."""
    stem = shard.name.removesuffix(shard.format.suffix)
    names = [stem + found.suffix for found in FORMATS]
    return [path for join in joins for path in (join / name for name in names) if path.is_file()]


def partners_of(shard: ShardFile, joins: Sequence[Path], findings: Findings) -> list[Path]:
    """As `joined_files`; a folder without a file for the shard is a finding."""
    for join in joins:
        if not joined_files(shard, [join]):
            detail = f"{join} has no file of this name: what is joined from there lacks for all samples of the shard"
            findings.add("", MISSING_PARTNER, detail)
    return joined_files(shard, joins)


def check_joins(root: Path, shards: Sequence[ShardFile], joins: Sequence[Path]) -> None:
    """Raise DatasetError if a folder is named twice, is one of the dataset's, or has nothing for any shard."""
    folders = {(root / folder).resolve() for shard in shards for folder in Path(shard.name).parents} if joins else set()
    named = {join.resolve() for join in joins}
    if len(named) < len(joins) or named & folders:
        raise DatasetError(
            f"--join names a folder twice, or the dataset's own ({root}), or one in it whose files are shards;"
            " name other folders, each once"
        )
    for join in joins:
        if not join.is_dir() or not any(joined_files(shard, [join]) for shard in shards):
            raise DatasetError(
                f"--join {join} has no file for any of the {len(shards)} shards; a folder is required whose tars or"
                f" parquet files have the names of the shards, such as {join / shards[0].name}"
            )


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
        if not (isinstance(entry, list) and len(entry) == 4 and [*map(type, entry)] == [str, int, int, int]):
            raise ValueError(f"{path} is damaged; index again")
    return found  # type: ignore[no-any-return]


def are_as_joined(shard: ShardFile, joins: Sequence[Path]) -> bool:
    """Whether the index of a shard was made of the joined files as they are now."""
    try:
        before = read_state(shard)
    except FileNotFoundError:
        before = []
    except (OSError, ValueError, RecursionError):
        return False
    return bool(before == state_of_joined(joined_files(shard, joins)))


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
