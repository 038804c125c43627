"""Files that are written whole or not at all, and outlast a power cut."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from dataserver.dataset import DatasetError
from dataserver.dataset.index.format import atomic_writer
from dataserver.outputs import TEMP_LIFETIME_S, TEMP_SUFFIX


def descriptors() -> int:
    """How many are open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def fail(path: Path, error: BaseException) -> None:
    with atomic_writer(path) as temp:
        temp.write_bytes(b"half")
        raise error


def test_a_file_is_synced_before_it_has_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "new" / "file", []

    def sync(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, path.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    before = descriptors()
    with atomic_writer(path) as temp:
        assert (temp.parent, temp.name[:6], temp.suffix) == (path.parent, ".file.", TEMP_SUFFIX)
        temp.write_bytes(b"content")
        assert not path.exists()
    assert synced == [(temp.name, False), ("new", True)]
    assert descriptors() == before
    assert path.read_bytes() == b"content"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert list(path.parent.iterdir()) == [path]


def test_a_writer_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    before = descriptors()
    for error in (KeyError("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fail(path, error)
    with pytest.raises(DatasetError) as caught:
        fail(path, OSError(28, "No space left on device"))
    assert str(caught.value) == (
        f"cannot write {path}: [Errno 28] No space left on device; make the folder writable and the disk large enough,"
        " or name a writable folder with --index-dir"
    )
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"


def test_the_first_writer_of_a_folder_sweeps_what_killed_ones_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = f".file.a{TEMP_SUFFIX}", f".other.a{TEMP_SUFFIX}"
    ages = {**dict.fromkeys(old, 1), f".file.b{TEMP_SUFFIX}": -1, ".file.a": 1, "file.a.tmp": 1, ".file.a.tmp": 1}
    for name, older_s in ages.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 1_000_000 - TEMP_LIFETIME_S - older_s))
    monkeypatch.setattr("dataserver.dataset.index.format.time.time", lambda: 1_000_000.0)
    with atomic_writer(tmp_path / "new") as temp:
        temp.write_bytes(b"content")
    assert {entry.name for entry in tmp_path.iterdir()} == {*(ages.keys() - set(old)), "new"}


def test_a_folder_is_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned = []

    def scan(folder: Path) -> Any:
        scanned.append(folder)
        return scandir(folder)

    scandir = os.scandir
    monkeypatch.setattr("dataserver.dataset.index.format.os.scandir", scan)
    for number in range(3):
        with atomic_writer(tmp_path / str(number)) as temp:
            temp.write_bytes(b"content")
    assert scanned == [tmp_path]
