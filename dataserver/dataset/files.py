"""Where the files of a dataset lie: shards below a root, their sidecars, indexes and token counts beside them."""

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from dataserver.dataset.errors import DatasetError, StaleIndexError
from dataserver.dataset.index import NO_SIDECAR, IndexHeader, read_schema
from dataserver.dataset.stamps import Stamp, digest_file

SHARD_SUFFIX: Final = ".tar"
MAX_SHARDS: Final = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One shard and the files that belong to it; `name` is its path relative to the root, with slashes."""

    name: str
    root: Path
    index_dir: Path | None
    """Where indexes lie instead of beside the shards."""

    @property
    def path(self) -> Path:
        """The tar itself."""
        return self.root / self.name

    @property
    def index_path(self) -> Path:
        """The index file, beside the shard or at the same relative path below `index_dir`."""
        return (self.index_dir or self.root) / f"{self.name}.index"

    @property
    def index_command(self) -> str:
        """The command that indexes this dataset."""
        return f"dataserver index {self.root}" + (f" --index-dir {self.index_dir}" if self.index_dir else "")

    @property
    def sidecar_path(self) -> Path:
        """The parquet that img2dataset writes beside the tar."""
        return self.path.with_suffix(".parquet")

    def tokens_path(self, tokenizer_digest: str) -> Path:
        """The token counts of one tokenizer, beside the index."""
        return self._of_tokenizer("tokens", tokenizer_digest)

    def token_ids_path(self, tokenizer_digest: str) -> Path:
        """The token ids of one tokenizer, beside the index."""
        return self._of_tokenizer("ids", tokenizer_digest)

    def _of_tokenizer(self, what: str, tokenizer_digest: str) -> Path:
        short = hashlib.sha256(tokenizer_digest.encode()).hexdigest()[:16]
        return self.index_path.with_name(f"{self.path.name}.{what}-{short}")

    def stamps(self) -> tuple[Stamp, Stamp | None]:
        """Return the stamps of the shard and of its sidecar, None where there is none. Raises OSError."""
        try:
            sidecar = Stamp.of(self.sidecar_path.stat())
        except FileNotFoundError:
            sidecar = None
        return Stamp.of(self.path.stat()), sidecar


@dataclass(frozen=True, slots=True)
class IndexedShard:
    """A shard whose index has its size and format."""

    file: ShardFile
    header: IndexHeader
    columns: Mapping[str, str]
    """Sidecar columns: name -> Arrow type."""
    stamps: tuple[Stamp, Stamp | None]
    """Of the shard and its sidecar, before their contents were compared with the index."""
    younger: tuple[tuple[Path, str], ...]
    """Those of the two that changed after the index was written, each with the SHA-256 of what was indexed."""


def find_shards(path: Path, index_dir: Path | None = None) -> tuple[ShardFile, ...]:
    """List the shards at `path` (a folder, searched recursively, or one tar) in name order.

    Raises:
        DatasetError: the path does not exist, holds no shard, or a shard lies outside of it behind a link.
    """
    try:
        path.stat()
    except OSError as error:
        raise DatasetError(
            f"dataset path {path} cannot be opened ({error.strerror}); name a folder that holds .tar shards"
        ) from error
    if path.is_file():
        if path.suffix != SHARD_SUFFIX:
            raise DatasetError(f"{path} is not a .tar shard; name a folder that holds .tar shards")
        root, names = path.parent, [path.name]
    else:
        root, names = path, sorted(_walk(path))
    if not names:
        raise DatasetError(f"no .tar shards below {path}; name a folder that img2dataset or webdataset wrote")
    real_root = root.resolve()
    for name in names:
        _check_name(root, real_root, name)
    return tuple(ShardFile(name, root, index_dir) for name in names)


def _walk(root: Path) -> list[str]:
    names: list[str] = []
    for folder, folders, files in os.walk(root, onerror=_raise_unreadable):
        folders[:] = [f for f in folders if not f.startswith(".")]
        relative = PurePosixPath(Path(folder).relative_to(root).as_posix())
        names += [str(relative / f) for f in files if f.endswith(SHARD_SUFFIX) and not f.startswith(".")]
        if len(names) > MAX_SHARDS:
            raise DatasetError(f"more than {MAX_SHARDS} shards below {root}; split the dataset")
    return names


def _raise_unreadable(error: OSError) -> None:
    raise DatasetError(f"cannot list {error.filename}: {error.strerror}; make the folder readable") from error


def _check_name(root: Path, real_root: Path, name: str) -> None:
    if not name.isprintable():
        raise DatasetError(f"shard name {name!a} is not printable UTF-8; rename the file")
    for path in (root / name, (root / name).with_suffix(".parquet")):
        if not path.resolve().is_relative_to(real_root):
            raise DatasetError(
                f"{path} is a link that leaves the dataset folder {root}; copy the file into it or name its own folder"
            )
    if not (root / name).is_file():
        raise DatasetError(f"shard {root / name} is not a regular file; remove it or repair the link")


def read_fresh_index(shard: ShardFile) -> IndexedShard:
    """Read what a shard's index says of it, after comparing contents where the files' times do not tell.

    Raises:
        StaleIndexError: the index is missing, unreadable, or does not belong to the shard as it is now.
        DatasetError: the shard cannot be reached.
    """
    indexed = read_index(shard)
    for path, sha256 in indexed.younger:
        _log.info("%s changed after it was indexed: comparing contents; %s does so once", path, shard.index_command)
        try:
            same = digest_file(path) == sha256
        except OSError as error:
            raise _unreachable(shard, error) from error
        if not same:
            raise _stale(shard, f"its index describes another content of {path.name}")
    return indexed


def read_index(shard: ShardFile) -> IndexedShard:
    """Read what a shard's index says of it; contents are not compared. Raises as `read_fresh_index`."""
    try:
        written_ns = shard.index_path.stat().st_ctime_ns
        header, columns = read_schema(shard.index_path)
    except FileNotFoundError as error:
        raise _stale(shard, f"it has no index at {shard.index_path}") from error
    except (OSError, StaleIndexError) as error:
        raise _stale(shard, str(error)) from error
    try:
        stamp, sidecar = stamps = shard.stamps()
    except OSError as error:
        raise _unreachable(shard, error) from error
    if stamp.num_bytes != header.shard_bytes:
        raise _stale(shard, f"its index describes {header.shard_bytes} bytes, it has {stamp.num_bytes}")
    if (sidecar.num_bytes if sidecar else NO_SIDECAR) != header.sidecar_bytes:
        raise _stale(shard, f"its index was made with another {shard.sidecar_path.name}")
    contents = [(stamp, shard.path, header.sha256), (sidecar, shard.sidecar_path, header.sidecar_sha256)]
    # Equal times prove nothing: file systems count them in milliseconds.
    younger = tuple((path, sha256) for found, path, sha256 in contents if found and found.ctime_ns >= written_ns)
    return IndexedShard(shard, header, columns, stamps, younger)


def _unreachable(shard: ShardFile, error: OSError) -> DatasetError:
    return DatasetError(f"shard {shard.path} cannot be reached: {error}; check the storage")


def _stale(shard: ShardFile, reason: str) -> StaleIndexError:
    return StaleIndexError(f"shard {shard.path}: {reason}; run: {shard.index_command}")
