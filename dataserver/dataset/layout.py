"""Where the files of a dataset lie: shards below a root, their sidecars, indexes and token counts beside them."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from dataserver.dataset.errors import DatasetError, StaleIndexError
from dataserver.dataset.index import NO_SIDECAR, IndexHeader, read_schema

SHARD_SUFFIX: Final = ".tar"
MAX_SHARDS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One shard and the files that belong to it; `name` is its path relative to the root, with slashes."""

    name: str
    path: Path
    index_path: Path

    @property
    def sidecar_path(self) -> Path:
        """The parquet that img2dataset writes beside the tar."""
        return self.path.with_suffix(".parquet")

    def tokens_path(self, tokenizer_digest: str) -> Path:
        """The token counts of one tokenizer, beside the index."""
        short = hashlib.sha256(tokenizer_digest.encode()).hexdigest()[:16]
        return self.index_path.with_name(f"{self.path.name}.tokens-{short}")

    def stats(self) -> tuple[int, int, float]:
        """Return (shard bytes, sidecar bytes, younger modification time of the two in seconds)."""
        shard = self.path.stat()
        try:
            sidecar = self.sidecar_path.stat()
        except FileNotFoundError:
            return shard.st_size, NO_SIDECAR, shard.st_mtime
        return shard.st_size, sidecar.st_size, max(shard.st_mtime, sidecar.st_mtime)


def find_shards(path: Path, index_dir: Path | None = None) -> tuple[ShardFile, ...]:
    """List the shards at `path` (a folder, searched recursively, or one tar) in name order.

    Raises:
        DatasetError: the path does not exist, holds no shard, or a shard lies outside of it behind a link.
    """
    if not path.exists():
        raise DatasetError(f"dataset path {path} does not exist; name a folder that holds .tar shards")
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
    base = index_dir if index_dir is not None else root
    return tuple(ShardFile(name, root / name, base / f"{name}.index") for name in names)


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


def read_fresh_schema(shard: ShardFile) -> tuple[IndexHeader, dict[str, str]]:
    """Return header and sidecar columns of a shard's index after comparing it with the shard.

    Raises:
        StaleIndexError: the index is missing, unreadable, or does not belong to the shard as it is now.
    """
    if not shard.index_path.exists():
        raise StaleIndexError(_command(shard, f"it has no index at {shard.index_path}"))
    header, columns = read_schema(shard.index_path)
    shard_bytes, sidecar_bytes, mtime = shard.stats()
    if shard_bytes != header.shard_bytes:
        raise StaleIndexError(_command(shard, f"its index describes {header.shard_bytes} bytes, it has {shard_bytes}"))
    if sidecar_bytes != header.sidecar_bytes:
        raise StaleIndexError(_command(shard, f"its index was made with another {shard.sidecar_path.name}"))
    if mtime > shard.index_path.stat().st_mtime:
        raise StaleIndexError(_command(shard, "it is younger than its index"))
    return header, columns


def _command(shard: ShardFile, reason: str) -> str:
    return f"shard {shard.path}: {reason}; run: dataserver index PATH (with the same --index-dir, if one is used)"
