"""Where the files of a dataset lie: shards below a root, their sidecars, indexes and token counts beside them.

A dataset has shards of one format: the first of the registry that any of its files has.
"""

import contextlib
import hashlib
import logging
import os
import time
from bisect import insort
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath, PurePosixPath
from typing import Final

from dataserver.dataset.energon import split_of, unused_shards
from dataserver.dataset.errors import DatasetError, is_safe
from dataserver.dataset.shards.external import is_gone
from dataserver.dataset.shards.formats import FORMATS, format_of
from dataserver.dataset.shards.interface import ShardFormat
from dataserver.dataset.shards.unread import (
    ARRAY,
    LONE_MANIFEST,
    LONE_MEDIA,
    LONE_PAIRS,
    LONE_SIDECAR,
    LONE_TEXTS,
    ODD_LINK,
    ODD_NAME,
    REMOTE_MANIFEST,
    UNNAMED_TAR,
    UNOPENED_JSON,
    may_be_caption,
    remedy_of,
)
from dataserver.dataset.storage.etags import TICK_S, Etag
from dataserver.dataset.storage.folder_listings import LISTING_NAME, is_media
from dataserver.dataset.storage.index_mirror import index_root
from dataserver.dataset.storage.interface import EntryKind, Storage
from dataserver.dataset.storage.registry import storage_of
from dataserver.dataset.storage.urls import expanded, is_url, location

_SOUGHT: Final = tuple(found for found in FORMATS if found.is_sought)
SUFFIXES: Final = f"{', '.join(found.suffix for found in _SOUGHT[:-1])} or {_SOUGHT[-1].suffix}"
"""Endings of shards' names, for messages."""
INDEX_SUFFIX: Final = ".index"
MAX_SHARDS: Final = 1 << 20
MAX_ASKED: Final = 32
"""Requests for the state of shards at a time, where no listing tells it."""
MAX_LOOKS: Final = 16
"""In a store so many files without an extension are looked at, whether they are tars; in a folder without images so
many files of JSON, the first by name, whether they are arrays."""
_KNOWN_SUFFIXES: Final = tuple(dict.fromkeys(s for f in _SOUGHT for s in (f.suffix, f.sidecar_suffix) if s))
_MOST_SHOWN: Final = 8
"""Names that one message shows at most."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One shard and the files that belong to it; `name` is its path relative to the root, with slashes."""

    name: str
    root: Path
    index_dir: Path | None
    """Where indexes lie instead of beside the shards."""
    listed: tuple[Etag, Etag | None] | None = field(default=None, compare=False)
    """Etags of the shard and its sidecar, where the listing told them."""
    dataset: Path | None = field(default=None, compare=False)
    """What names the dataset, for messages, where it is not its root: one shard, braces, or a split of the folder."""

    @property
    def path(self) -> Path:
        """Path of the shard, or where it lies in its store."""
        return self.root / self.name

    @property
    def format(self) -> ShardFormat:
        """How the shard is read."""
        found = format_of(self.name)
        assert found is not None, self.name
        return found

    @property
    def index_path(self) -> Path:
        """The index file, beside the shard or at the same relative path below `index_dir`, or in a mirror of these."""
        return index_folder(self) / f"{self.name}{INDEX_SUFFIX}"

    @property
    def sidecar_path(self) -> Path | None:
        """The file with the shard's columns, such as the parquet that img2dataset writes beside a tar, if it has one.

        None where the format has its columns in the shard itself.
        """
        name = _sidecar_name(self.name, self.format)
        return self.root / name if name else None

    def tokens_path(self, tokenizer_digest: str) -> Path:
        """The token counts of one tokenizer, beside the index."""
        return self._beside("tokens", tokenizer_digest)

    def token_ids_path(self, tokenizer_digest: str) -> Path:
        """The token ids of one tokenizer, beside the index."""
        return self._beside("ids", tokenizer_digest)

    def derived_path(self, transform: str) -> Path:
        """The columns that a transform of metadata made, by its key, beside the index."""
        return self._beside("derived", transform)

    def _beside(self, what: str, key: str) -> Path:
        short = hashlib.sha256(key.encode()).hexdigest()[:16]
        return self.index_path.with_name(f"{self.path.name}.{what}-{short}")

    @property
    def storage(self) -> Storage:
        """The backend that the shard and its sidecar lie in."""
        return storage_of(self.path)

    def etags(self) -> tuple[Etag, Etag | None]:
        """Return the etags of the shard and of its sidecar, None where there is none. Raises OSError."""
        path = f"{self.root}/{self.name}"  # text: a server asks for very many, and `Path` takes longer than the file
        storage = storage_of(path)
        sidecar = None
        if sidecar_path := _sidecar_name(path, self.format):
            with contextlib.suppress(FileNotFoundError):
                sidecar = storage.etag(sidecar_path)
        return storage.etag(path), sidecar

    def settled_etags(self) -> tuple[Etag, Etag | None]:
        """The same, for reading the files now: whatever changes them from here on gives them other etags.

        A file that changed a moment ago could change once more without a new time; that moment is waited for. Raises
        OSError.
        """
        etags = self.etags()
        if any(e is not None and time.time_ns() - e.ctime_ns < TICK_S * 1e9 for e in etags):
            time.sleep(TICK_S)
        return etags


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies at the path of a dataset."""

    shards: tuple[ShardFile, ...]
    """Shards in the order of their names."""
    links: tuple[str, ...]
    """Links to folders that are not searched: relative to the root, in name order."""
    unread: tuple[tuple[str, str], ...] = ()
    """Files that look like shards or their metadata and are not read, each with what helps; in name order."""
    is_folder: bool = True
    """Whether a folder was named, and not a shard."""

    def warn_of_links(self) -> None:
        """Log the links, where there are any: what lies behind them is easily taken for a part of the dataset."""
        if self.links:
            _log.warning("%s; name the folders themselves, or put the shards where the links are", _links(self.links))


def find_shards(path: Path, index_dir: Path | None = None) -> tuple[ShardFile, ...]:
    """The shards at a path in name order; as `list_shards`."""
    return list_shards(path, index_dir).shards


def list_shards(path: Path, index_dir: Path | None = None) -> Listing:
    """List the shards at `path`: a folder, searched recursively but not behind links, or one shard.

    Raises:
        DatasetError: the path does not exist, holds no shard, or a shard lies outside of it behind a link.
    """
    path, index_dir = location(path), None if index_dir is None else location(index_dir)
    given = path
    path, split = (path, "") if is_url(path) else split_of(path)
    storage = storage_of(path)
    if index_dir is None and not storage.holds_indexes:
        raise DatasetError(f"{path} lies in a storage that holds no indexes; name a local folder with --index-dir")
    if (named := expanded(path)) is not None:
        return Listing(_asked(path, named[0], sorted(named[1]), index_dir), ())
    try:
        is_file = storage.is_file(path)
    except OSError as error:
        raise DatasetError(
            f"dataset path {path} cannot be opened ({error.strerror}); name a folder that holds {SUFFIXES} shards"
        ) from error
    links: list[str] = []
    unread: dict[str, str] = {}
    etags: dict[str, Etag] = {}
    if is_file:
        _check_format(path, storage)
        root, names = path.parent, {path.name: True}
    else:
        root = path
        names = _find(storage, path, links, unread, etags)
    if not names:
        skipped = f" ({_links(links)})" if links else ""
        skipped += "".join(f" ({name!a}: {remedy})" for name, remedy in sorted(unread.items())[:1])
        found = f"no {SUFFIXES} shards and no images, clips or videos below {path}{skipped}"
        raise DatasetError(f"{found}; name a folder that img2dataset or datasets wrote")
    for name in sorted(names):
        if names[name] or not is_safe(name):
            _check_name(storage, root, name)
    unused = unused_shards(root, names, split) if storage.is_local and not is_file else {}
    names = {name: is_unusual for name, is_unusual in names.items() if name not in unused}
    unread |= unused
    dataset = given if given != root else None
    shards = tuple(ShardFile(name, root, index_dir, _listed(name, etags), dataset) for name in sorted(names))
    if index_dir is not None and is_url(index_dir) and any(shard.format.has_external for shard in shards):
        raise DatasetError(
            f"the images of {path} lie in files of their own, whose index cannot lie at {index_dir}; name a local"
            " folder with --index-dir"
        )
    return Listing(shards, tuple(sorted(links)), tuple(sorted(unread.items())), not is_file)


def index_folder(shard: ShardFile) -> Path:
    """Where the indexes of a shard's dataset lie on this machine."""
    return index_root(shard.root, shard.index_dir)


def _asked(path: Path, root: Path, names: Sequence[str], index_dir: Path | None) -> tuple[ShardFile, ...]:
    """The shards that braces stand for; each is asked for. Raises DatasetError where they are none, or missing."""
    storage = storage_of(root)
    _check_format(root / names[0], storage)  # names differ in numbers alone, so all have one format
    for name in names:
        storage.check(root, name)
    shards = [ShardFile(name, root, index_dir, dataset=path) for name in names]
    try:
        with ThreadPoolExecutor(MAX_ASKED) as threads:
            return tuple(
                replace(s, listed=etags) for s, etags in zip(shards, threads.map(ShardFile.etags, shards), strict=True)
            )
    except OSError as error:
        raise DatasetError(f"dataset path {path} cannot be opened ({error.strerror})") from error


def _check_format(path: Path, storage: Storage) -> None:
    """Raise DatasetError where a file that was named is no shard, or none that is read from where it lies."""
    found = format_of(path.name)
    if found is None:
        raise DatasetError(f"{path} is not a {SUFFIXES} shard; name a folder that holds {SUFFIXES} shards")
    if found.has_external and not storage.is_local:
        raise DatasetError(f"{path}: {REMOTE_MANIFEST}")


def _listed(name: str, etags: Mapping[str, Etag]) -> tuple[Etag, Etag | None] | None:
    shard_format = format_of(name)
    if name not in etags or shard_format is None:
        return None
    return etags[name], etags.get(_sidecar_name(name, shard_format))


def _links(links: Sequence[str]) -> str:
    more = f" and {len(links) - _MOST_SHOWN} more" if len(links) > _MOST_SHOWN else ""
    shown = ", ".join(map(ascii, sorted(links)[:_MOST_SHOWN]))
    return f"folders behind links are not searched: {shown}{more}"


@dataclass(slots=True)
class _Beside:
    """What lies below a folder besides shards and their sidecars."""

    unread: dict[str, str]
    """Files that look like shards and are not read, with what helps."""
    media: set[str] = field(default_factory=set)
    """Folders that hold images, clips or videos."""
    texts: set[str] = field(default_factory=set)
    """Folders that hold what may be their texts."""
    json: dict[str, list[str]] = field(default_factory=dict)
    """Files of JSON, and links of such names, by their folders: the first of each by name, in that order."""
    num_looks: int = MAX_LOOKS

    def note(self, storage: Storage, root: Path, name: str, kind: EntryKind) -> None:
        """Note a file. Raises OSError."""
        folder, _, base = name.rpartition("/")
        if is_media(base):
            self.media.add(folder)
        elif remedy := remedy_of(name):
            self.unread[name] = remedy
        elif may_be_caption(base):
            self.texts.add(folder)
        elif base.lower().endswith(".json"):
            of_folder = self.json.setdefault(folder, [])
            insort(of_folder, name)
            del of_folder[MAX_LOOKS:]
        elif kind is EntryKind.FILE and self.num_looks and "." not in base:
            self.num_looks -= not storage.is_local  # each is a request
            if _begins_as_tar(storage, root / name):
                self.unread[name] = UNNAMED_TAR

    def note_arrays(self, storage: Storage, root: Path) -> None:
        """Note JSON arrays that are no members of images beside them: manifests such as LLaVA's.

        What cannot be opened is noted as such: the dataset does not need the file. Links that lead nowhere, and what is
        no regular file, are passed over.
        """
        for name in (name for folder in self.json.keys() - self.media for name in self.json[folder]):
            try:
                if not storage.is_file(root / name):
                    continue
                storage.check(root, name)
                with storage.open(root / name) as file:
                    head = file.read(64)
            except DatasetError:
                self.unread[name] = ODD_LINK
            except OSError as error:
                if not is_gone(error):
                    self.unread[name] = UNOPENED_JSON
            else:
                if head.lstrip().startswith(b"["):
                    self.unread[name] = ARRAY


def _find(
    storage: Storage, root: Path, links: list[str], unread: dict[str, str], etags: dict[str, Etag]
) -> dict[str, bool]:
    """The shards below a folder, each with whether it or its sidecar is a link, or else no regular file.

    Links to folders are appended to `links`, and files that are not read are noted in `unread` with what helps. What
    the listing tells of shards and sidecars is put into `etags`.
    """
    names: dict[str, dict[str, bool]] = {suffix: {} for suffix in _KNOWN_SUFFIXES}
    beside = _Beside(unread)
    try:
        for name, kind, etag in storage.walk(root):
            if etag is not None and name.endswith(_KNOWN_SUFFIXES):
                if str(PurePosixPath(name)) != name or ".." in name.split("/"):
                    unread[name] = ODD_NAME
                    continue
                etags[name] = etag
            if kind is EntryKind.FOLDER_LINK:
                if not _is_searched(root, name):
                    links.append(name)
            elif suffix := next((suffix for suffix in names if name.endswith(suffix)), ""):
                names[suffix][name] = kind is EntryKind.LINK
                if len(names[suffix]) > MAX_SHARDS:
                    raise DatasetError(f"more than {MAX_SHARDS} shards below {root}; split the dataset")
            else:
                beside.note(storage, root, name, kind)
        if storage.is_local and not any(names.values()):
            beside.note_arrays(storage, root)
    except OSError as error:
        where = error.filename or root
        raise DatasetError(f"cannot list {where}: {error.strerror}; make the folder readable") from error
    return _chosen(storage, names, beside)


def _is_searched(root: Path, link: str) -> bool:
    """Whether a link to a folder leads to one that is searched all the same, as `latest -> v2` does."""
    target, top = Path(os.path.realpath(root / link)), os.path.realpath(root)
    return target.is_relative_to(top) and not any(part.startswith(".") for part in target.relative_to(top).parts)


def _chosen(storage: Storage, names: dict[str, dict[str, bool]], beside: _Beside) -> dict[str, bool]:
    """The shards of the first format that any file has, as `_find`; files of the others are noted as not read.

    Args:
        storage: they lie there. Elsewhere than here, each image in a file of its own would cost a request.
        names: of files by suffix, each with whether it is unusual.
        beside: what lies there, too.
    """
    sought = [found for found in _SOUGHT if storage.is_local or not found.has_external]
    chosen = next((found for found in sought if names[found.suffix]), None)
    found: dict[str, bool] = {}
    if chosen is not None:
        found = _with_sidecars(names.pop(chosen.suffix), names.get(chosen.sidecar_suffix, {}), chosen)
        unread, why = (beside.media & beside.texts, LONE_PAIRS) if chosen.has_external else (beside.media, LONE_MEDIA)
        beside.unread |= {f"{folder or '.'}/": why for folder in unread}
    elif storage.is_local and beside.media:
        found = {f"{folder}/{LISTING_NAME}".lstrip("/"): False for folder in beside.media}
        beside.unread |= {f"{folder or '.'}/": LONE_TEXTS for folder in beside.texts - beside.media}
    elif beside.media:
        beside.unread[f"{min(beside.media) or '.'}/"] = REMOTE_MANIFEST
    lone_manifest = LONE_MANIFEST if storage.is_local else REMOTE_MANIFEST
    for suffix, others in names.items():
        beside.unread |= dict.fromkeys(others, lone_manifest if suffix == ".jsonl" else LONE_SIDECAR)
    return found


def _with_sidecars(shards: Mapping[str, bool], others: dict[str, bool], chosen: ShardFormat) -> dict[str, bool]:
    """Mark shards whose sidecar is unusual, and take all sidecars out of `others`."""
    return {name: is_unusual | others.pop(_sidecar_name(name, chosen), False) for name, is_unusual in shards.items()}


def _sidecar_name(name: str, shard_format: ShardFormat) -> str:
    """The name of a shard's sidecar; empty where its format has none."""
    suffix = shard_format.sidecar_suffix
    return name.removesuffix(shard_format.suffix) + suffix if suffix else ""


def _begins_as_tar(storage: Storage, path: PurePath) -> bool:
    """Whether a file begins with the header of a tar (POSIX, at byte 257). Raises OSError."""
    with storage.open(path) as file:
        return file.read(262)[257:] == b"ustar"


def _check_name(storage: Storage, root: Path, name: str) -> None:
    if not is_safe(name):
        raise DatasetError(
            f"shard name {name!a} is not UTF-8, or has control characters or line breaks; rename the file"
        )
    storage.check(root, name)
    shard_format = format_of(name)
    if shard_format is not None and (sidecar := _sidecar_name(name, shard_format)):
        storage.check(root, sidecar)
    try:
        is_file = storage.is_file(root / name)
    except OSError:
        is_file = False
    if not is_file:
        raise DatasetError(f"shard {root / name} is not a regular file; remove it or repair the link")
