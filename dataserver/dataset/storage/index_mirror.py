"""Indexes in a store: servers map files, so a local folder mirrors those that lie beside the shards.

`pull` fetches what differs there, `publish` writes what was made here. A line of JSON in the folder says which version
of the store's file each local one is. So what is gone on one side, and as it was on the other, was removed: the other
side removes it, too. The store's word wins where both changed.
"""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from dataserver.dataset.errors import DatasetError
from dataserver.dataset.storage.client_interface import ObjectInfo
from dataserver.dataset.storage.etags import TICK_S
from dataserver.dataset.storage.pieces import BLOCK_BYTES
from dataserver.dataset.storage.registry import remote_storage
from dataserver.dataset.storage.trusted_folder import own_folder
from dataserver.dataset.storage.urls import Url, location
from dataserver.outputs import beside
from dataserver.planning.kernels.cache import user_cache

SUMMARY: Final = "disttrain.summary"
"""It counts only while it is younger than all that it describes, so it is written last."""
_STATE_NAME: Final = "mirror.json"
_OF_INDEX: Final = re.compile(
    r"(?:.+/)?(?:disttrain\.(?:summary|sets|flags|joins|duplicates-allowed|statistics-[0-9a-f]{16})"
    r"|[^/]+\.(?:tar|parquet)\.(?:index|numeric|known|joined|(?:tokens|ids|derived)-[0-9a-f]{16}))"
)
_REMOVED: Final = re.compile(r"(?:.+/)?(?:disttrain\.(?:flags|joins)|[^/]+\.joined)")
"""What indexing removes. Nothing else that is missing here was removed by it; it is fetched again."""
_State = dict[str, list[Any]]
"""By name: ETag, size and date of the store's file; size and time of the local one."""


@lru_cache(1024)
def index_root(root: Path, index_dir: Path | None) -> Path:
    """Return the local folder of a dataset's index: beside its shards, in `index_dir`, or the mirror of either.

    Raises:
        DatasetError: the mirror's folder cannot be used.
    """
    chosen = location(index_dir or root)
    return mirror_folder(chosen) if isinstance(chosen, Url) else chosen


def mirror_folder(url: Url) -> Path:
    """The local folder that mirrors the indexes below a URL."""
    cache = user_cache()
    if cache is None:
        raise DatasetError(
            f"the index of {url} has no folder on this machine: this user has no home; set XDG_CACHE_HOME, or name a"
            " local folder with --index-dir"
        )
    name = hashlib.sha256(str(url).encode()).hexdigest()[:32]
    own_folder(cache / "indexes", "the folder of indexes")
    return own_folder(cache / "indexes" / name, "the folder of indexes")


def pull(root: Path, index_dir: Path | None) -> None:
    """Bring the local folder of a dataset's index up to date, where it mirrors a store.

    Raises:
        DatasetError: the store cannot be read, or the folder not be written.
    """
    url = location(index_dir or root)
    if not isinstance(url, Url):
        return
    folder = mirror_folder(url)
    state = _read_state(folder)
    store = remote_storage(url).store(url)
    begin = f"{url.key}/" if url.key else ""
    try:
        found = [info for info in store.objects(url.key) if _OF_INDEX.fullmatch(info.key.removeprefix(begin))]
        named = {info.key.removeprefix(begin): info for info in found}
        _remove_gone(folder, state, named)
        removed = _removed_here(folder, state)
        changed = [
            name
            for name, info in named.items()
            if state.get(name, [])[:3] != _version(info) or not (name in removed or (folder / name).exists())
        ]
        for name in sorted(changed, key=lambda name: name == SUMMARY):
            info = named[name]
            if name == SUMMARY:
                time.sleep(TICK_S)  # file systems count times in milliseconds
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with beside(path) as temp, temp.open("wb") as file, store.sequential(info) as source:
                shutil.copyfileobj(source, file, BLOCK_BYTES)
            state[name] = [*_version(info), *_local(path)]
    except OSError as error:
        raise DatasetError(f"the index at {url} cannot be read ({error.strerror}); check the store") from error
    finally:
        _write_state(folder, state)


def publish(root: Path, index_dir: Path | None) -> int:
    """Write what is new in the local folder of a dataset's index to the store that it mirrors; the number of files.

    What was removed here is removed there.

    Raises:
        DatasetError: the store cannot be written; names what to do.
    """
    url = location(index_dir or root)
    if not isinstance(url, Url):
        return 0
    folder = mirror_folder(url)
    state = _read_state(folder)
    names = [
        name
        for path in folder.rglob("*")
        if path.is_file() and _OF_INDEX.fullmatch(name := str(path.relative_to(folder))) and not name.startswith(".")
    ]
    wanted = [name for name in names if state.get(name, [])[3:] != _local(folder / name)]
    try:
        for name in sorted(wanted, key=lambda name: name == SUMMARY):
            before = _local(folder / name)
            info = remote_storage(url).write(url / name, folder / name)
            state[name] = [*_version(info), *before]
        for name in _removed_here(folder, state):
            _remove_there(url / name, state[name])
            del state[name]
    except OSError as error:
        raise DatasetError(
            f"the index cannot be written to {url} ({error.strerror}); it lies in {folder}: run the same command again"
            " with credentials that may write there, or name another folder with --index-dir"
        ) from error
    finally:
        _write_state(folder, state)
    return len(wanted)


def _remove_gone(folder: Path, state: _State, there: Collection[str]) -> None:
    """Remove local files that the store had and has no more, but those that changed here."""
    for name in [name for name in state if name not in there]:
        path = folder / name
        if path.exists() and state[name][3:] == _local(path):
            path.unlink()
        del state[name]


def _removed_here(folder: Path, state: _State) -> set[str]:
    """What the store has, and indexing removed here; nothing where somebody emptied the folder."""
    missing = {name for name in state if not (folder / name).exists()}
    return {name for name in missing if _REMOVED.fullmatch(name)} if len(missing) < len(state) else set()


def _remove_there(url: Url, known: list[Any]) -> None:
    """Remove an object unless it changed meanwhile. Raises OSError."""
    store = remote_storage(url).store(url)
    with suppress(FileNotFoundError):
        if _version(store.head(url.key)) == known[:3]:
            store.budget.call(lambda: store.client.remove(url.key))


def _version(info: ObjectInfo) -> list[Any]:
    return [info.version, info.num_bytes, info.modified_ns if not info.version else 0]


def _local(path: Path) -> list[Any]:
    about = path.stat()
    return [about.st_size, about.st_mtime_ns]


def _read_state(folder: Path) -> _State:
    try:
        found = json.loads((folder / _STATE_NAME).read_text())
        return {str(name): list(entry) for name, entry in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # everything is compared anew


def _write_state(folder: Path, state: _State) -> None:
    try:
        with beside(folder / _STATE_NAME) as temp:
            temp.write_text(json.dumps(state))
    except OSError as error:
        raise DatasetError(f"cannot write {folder / _STATE_NAME}: {error.strerror}; make room there") from error
