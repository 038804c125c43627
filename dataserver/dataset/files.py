"""Where the files of a dataset lie: shards below a root, their sidecars, indexes and token counts beside them."""

import hashlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dataserver.dataset.errors import DatasetError, StaleIndexError
from dataserver.dataset.index import NO_SIDECAR, IndexHeader, read_schema
from dataserver.dataset.known import read_known, state_of
from dataserver.dataset.stamps import TICK_S, Stamp, digest_file
from dataserver.dataset.summary import IndexContent, Summary

SHARD_SUFFIX: Final = ".tar"
SIDECAR_SUFFIX: Final = ".parquet"
INDEX_SUFFIX: Final = ".index"
MAX_SHARDS: Final = 1 << 20
_MOST_SHOWN: Final = 8
"""Names in one message."""

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
        return (self.index_dir or self.root) / f"{self.name}{INDEX_SUFFIX}"

    @property
    def index_command(self) -> str:
        """The command that indexes this dataset."""
        return f"dataserver index {self.root}" + (f" --index-dir {self.index_dir}" if self.index_dir else "")

    @property
    def sidecar_path(self) -> Path:
        """The parquet that img2dataset writes beside the tar."""
        return self.path.with_suffix(SIDECAR_SUFFIX)

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
        path = f"{self.root}/{self.name}"  # text: a server asks for very many, and `Path` takes longer than the file
        try:
            sidecar = Stamp.of(os.stat(path.removesuffix(SHARD_SUFFIX) + SIDECAR_SUFFIX))  # noqa: PTH116
        except FileNotFoundError:
            sidecar = None
        return Stamp.of(os.stat(path)), sidecar  # noqa: PTH116

    def settled_stamps(self) -> tuple[Stamp, Stamp | None]:
        """The same, for reading the files now: whatever changes them from here on gives them other stamps.

        A file that changed a moment ago could change once more without a new time; that moment is waited for. Raises
        OSError.
        """
        stamps = self.stamps()
        if any(s is not None and time.time_ns() - s.ctime_ns < TICK_S * 1e9 for s in stamps):
            time.sleep(TICK_S)
        return stamps


@dataclass(frozen=True, slots=True)
class IndexedShard:
    """A shard whose index has its size and format."""

    file: ShardFile
    content: IndexContent
    stamps: tuple[Stamp, Stamp | None]
    """Of the shard and its sidecar, before their contents were compared with the index."""
    is_known: bool
    """Whether their contents are those of the index; else they may be others of the same sizes."""
    is_late: bool
    """Whether one of the two changed after the index was written."""

    @property
    def header(self) -> IndexHeader:
        """What the index says of its shard as a whole."""
        return self.content.header

    @property
    def columns(self) -> Mapping[str, str]:
        """Sidecar columns: name -> Arrow type."""
        return self.content.columns

    def changed_file(self) -> Path | None:
        """Read the shard and its sidecar; the first with another content than the index describes. Raises OSError."""
        header = self.header
        if digest_file(self.file.path) != header.sha256:
            return self.file.path
        if header.sidecar_sha256 and digest_file(self.file.sidecar_path) != header.sidecar_sha256:
            return self.file.sidecar_path
        return None


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies at the path of a dataset."""

    shards: tuple[ShardFile, ...]
    """In name order."""
    links: tuple[str, ...]
    """Links to folders, which are not searched: relative to the root, in name order."""

    def warn_of_links(self) -> None:
        """Log the links, where there are any: what lies behind them is easily taken for a part of the dataset."""
        if self.links:
            _log.warning("%s; name the folders themselves, or put the shards where the links are", _links(self.links))


def find_shards(path: Path, index_dir: Path | None = None) -> tuple[ShardFile, ...]:
    """The shards at a path in name order; as `list_shards`."""
    return list_shards(path, index_dir).shards


def list_shards(path: Path, index_dir: Path | None = None) -> Listing:
    """List the shards at `path`: a folder, searched recursively but not behind links, or one tar.

    Raises:
        DatasetError: the path does not exist, holds no shard, or a shard lies outside of it behind a link.
    """
    try:
        path.stat()
    except OSError as error:
        raise DatasetError(
            f"dataset path {path} cannot be opened ({error.strerror}); name a folder that holds .tar shards"
        ) from error
    links: list[str] = []
    if path.is_file():
        if path.suffix != SHARD_SUFFIX:
            raise DatasetError(f"{path} is not a .tar shard; name a folder that holds .tar shards")
        root, names = path.parent, {path.name: True}
    else:
        root = path
        names = _walk(path, links)
    if not names:
        skipped = f" ({_links(links)})" if links else ""
        raise DatasetError(f"no .tar shards below {path}{skipped}; name a folder that img2dataset or webdataset wrote")
    real_root = root.resolve()
    for name in sorted(names):
        if names[name] or not name.isprintable():
            _check_name(root, real_root, name)
    return Listing(tuple(ShardFile(name, root, index_dir) for name in sorted(names)), tuple(sorted(links)))


def _links(links: Sequence[str]) -> str:
    more = f" and {len(links) - _MOST_SHOWN} more" if len(links) > _MOST_SHOWN else ""
    shown = ", ".join(map(ascii, sorted(links)[:_MOST_SHOWN]))
    return f"folders behind links are not searched: {shown}{more}"


def index_folder(shard: ShardFile) -> Path:
    """Where the indexes of a shard's dataset lie."""
    return shard.index_dir or shard.root


def _walk(root: Path, links: list[str]) -> dict[str, bool]:
    """The shards below a folder, each with whether it or its sidecar is a link, or else no regular file.

    Links to folders are appended to `links`.
    """
    names: dict[str, bool] = {}
    odd: set[str] = set()
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(root / folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    name = folder + entry.name
                    if entry.is_dir():
                        if entry.is_symlink():
                            links.append(name)
                        else:
                            folders.append(f"{name}/")
                    elif name.endswith(SHARD_SUFFIX):
                        names[name] = not entry.is_file(follow_symlinks=False)
                    elif name.endswith(SIDECAR_SUFFIX) and not entry.is_file(follow_symlinks=False):
                        odd.add(name.removesuffix(SIDECAR_SUFFIX) + SHARD_SUFFIX)
        except OSError as error:
            _raise_unreadable(error)
        if len(names) > MAX_SHARDS:
            raise DatasetError(f"more than {MAX_SHARDS} shards below {root}; split the dataset")
    return {name: is_odd or name in odd for name, is_odd in names.items()}


def _raise_unreadable(error: OSError) -> None:
    raise DatasetError(f"cannot list {error.filename}: {error.strerror}; make the folder readable") from error


def _check_name(root: Path, real_root: Path, name: str) -> None:
    if not name.isprintable():
        raise DatasetError(f"shard name {name!a} is not printable UTF-8; rename the file")
    for path in (root / name, (root / name).with_suffix(SIDECAR_SUFFIX)):
        if not path.resolve().is_relative_to(real_root):
            raise DatasetError(
                f"{path} is a link that leaves the dataset folder {root}; copy the file into it or name its own folder"
            )
    if not (root / name).is_file():
        raise DatasetError(f"shard {root / name} is not a regular file; remove it or repair the link")


def read_fresh_index(shard: ShardFile, summary: Summary | None = None, lazily: bool = False) -> IndexedShard:
    """Read what a shard's index says of it, after comparing contents where they are not known.

    Args:
        shard: the shard.
        summary: of its dataset's indexes.
        lazily: leave it to whoever reads the shard, unless it changed after the index was written.

    Raises:
        StaleIndexError: the index is missing, unreadable, or does not belong to the shard as it is now.
        DatasetError: the shard cannot be reached.
    """
    indexed = read_index(shard, summary)
    if indexed.is_known or (lazily and not indexed.is_late):
        return indexed
    _log.info(
        "%s may have changed since it was indexed: comparing contents; %s does so once", shard.path, shard.index_command
    )
    try:
        stamps = shard.settled_stamps()
        changed = indexed.changed_file()
    except OSError as error:
        raise _unreachable(shard, error) from error
    if changed is not None:
        raise _stale(shard, f"its index describes another content of {changed.name}")
    return replace(indexed, stamps=stamps, is_known=True)


def read_index(shard: ShardFile, summary: Summary | None = None) -> IndexedShard:
    """Read what a shard's index says of it, or take it from the dataset's summary where that is as good.

    Contents are not compared. Raises as `read_fresh_index`.
    """
    try:
        written = os.stat(f"{shard.index_dir or shard.root}/{shard.name}{INDEX_SUFFIX}")  # noqa: PTH116
        content = None if summary is None else summary.find(shard.name, written)
        if content is None:
            content = IndexContent(*read_schema(shard.index_path), written.st_size, None)
    except FileNotFoundError as error:
        raise _stale(shard, f"it has no index at {shard.index_path}") from error
    except (OSError, StaleIndexError) as error:
        raise _stale(shard, str(error)) from error
    try:
        stamp, sidecar = stamps = shard.stamps()
    except OSError as error:
        raise _unreachable(shard, error) from error
    header, state = content.header, state_of(stamps)
    if stamp.num_bytes != header.shard_bytes:
        raise _stale(shard, f"its index describes {header.shard_bytes} bytes, it has {stamp.num_bytes}")
    if (sidecar.num_bytes if sidecar else NO_SIDECAR) != header.sidecar_bytes:
        raise _stale(shard, f"its index was made with another {shard.sidecar_path.name}")
    if content.known != state and (known := read_known(shard.index_path, header)) != content.known:
        content = replace(content, known=known)
    # Equal times prove nothing: file systems count them in milliseconds.
    is_late = any(s is not None and s.ctime_ns >= written.st_ctime_ns for s in stamps)
    return IndexedShard(shard, content, stamps, content.known == state, is_late)


def _unreachable(shard: ShardFile, error: OSError) -> DatasetError:
    return DatasetError(f"shard {shard.path} cannot be reached: {error}; check the storage")


def _stale(shard: ShardFile, reason: str) -> StaleIndexError:
    return StaleIndexError(f"shard {shard.path}: {reason}; run: {shard.index_command}")
