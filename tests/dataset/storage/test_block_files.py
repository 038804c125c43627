"""Blocks on a disk: never a wrong byte, whatever becomes of their files."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dataset.storage.objects import DATA, INFO, Store, settled, tail_key, whole_key
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.dataset import DatasetError
from dataserver.dataset.storage import block_files
from dataserver.dataset.storage.block_files import CHUNK_BYTES, SPARE_PART, BlockFiles
from dataserver.dataset.storage.blocks import Blocks
from dataserver.dataset.storage.client_interface import ObjectInfo
from dataserver.dataset.storage.pieces import BLOCK_BYTES, BlockKey, Piece

LAST = DATA[2 * BLOCK_BYTES :]


def path_of(files: BlockFiles) -> Path:
    (path,) = files._folder.glob("*/*.block")
    return path


def test_blocks_on_a_disk_outlive_the_process(tmp_path: Path) -> None:
    BlockFiles(tmp_path / "b", 1 << 30).write(tail_key(), LAST)
    again = BlockFiles(tmp_path / "b", 1 << 30)
    assert again.has(tail_key())
    assert again.read(tail_key(), 5, 100) == LAST[5:105]
    other = INFO._replace(version='"v2"')
    assert again.read(BlockKey("s3://bucket", other, 2), 5, 100) is None
    assert again.read(BlockKey("s3://other", INFO, 2), 5, 100) is None


@settings(max_examples=60)
@given(st.data())
def test_a_file_of_which_a_bit_flips_gives_the_right_bytes_or_none(data: st.DataObject) -> None:
    """Every bit of a file is covered, the checksums too."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        files = BlockFiles(Path(folder) / "blocks", 1 << 30)
        files.write(tail_key(), LAST)
        path = path_of(files)
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        assert files.read(tail_key(), 0, len(LAST)) is None
        assert not path.exists()


def test_a_chunk_is_compared_with_its_checksum_alone(files: BlockFiles) -> None:
    key, data = tail_key(0), DATA[:BLOCK_BYTES]
    files.write(key, data)
    with path_of(files).open("r+b") as file:
        file.seek(5 * CHUNK_BYTES)
        file.write(bytes([data[5 * CHUNK_BYTES] ^ 1]))
    assert files.read(key, 0, 5 * CHUNK_BYTES) == data[: 5 * CHUNK_BYTES]
    assert files.read(key, 6 * CHUNK_BYTES - 1, 2) is None


@pytest.mark.parametrize("cut", [0, 1, 100, 5000, 12345])
def test_a_file_that_is_cut_or_longer_is_none(files: BlockFiles, cut: int) -> None:
    files.write(tail_key(), LAST)
    path = path_of(files)
    path.write_bytes(path.read_bytes()[:cut] if cut else path.read_bytes() + b"x")
    assert files.read(tail_key(), 0, 10) is None


@pytest.mark.parametrize(("needed", "left"), [([], [1, 2]), ([0], [0, 2]), ([0, 1, 2], [1, 2])])
def test_the_oldest_files_go_where_there_is_no_room_and_needed_ones_last(
    tmp_path: Path, needed: list[int], left: list[int]
) -> None:
    files = BlockFiles(tmp_path / "b", 2 * BLOCK_BYTES + BLOCK_BYTES // 2)
    for number in range(3):
        files.write(whole_key(number), DATA[:BLOCK_BYTES], lambda: map(whole_key, needed))
        for path in files._folder.glob("*/*.block"):
            os.utime(path, (path.stat().st_mtime - 10,) * 2)
    assert [number for number in range(3) if files.has(whole_key(number))] == left


def test_a_full_folder_is_not_listed_for_each_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing takes as long as there are files; what is needed stays all the same."""

    def small(number: int) -> BlockKey:
        return BlockKey("s3://bucket", ObjectInfo(f"{number}.tar", 100, '"v1"', 0), 0)

    def needed() -> Iterator[BlockKey]:
        return map(small, range(5))

    number, more, looks = 4 * SPARE_PART, 20, list[int]()
    files = BlockFiles(tmp_path / "b", 1 << 30)
    files.write(small(0), bytes(100))
    files.most = number * path_of(files).stat().st_size
    listing = files._list
    monkeypatch.setattr(files, "_list", lambda: looks.append(1) or listing())  # type: ignore[func-returns-value]
    for n in range(1, number + more):
        files.write(small(n), bytes(100), needed)
    left = [n for n in range(number + more) if files.has(small(n))]
    assert left[:5] == list(range(5))
    assert number - 4 <= len(left) <= number
    assert 1 <= len(looks) <= 1 + more // 4


def test_a_full_disk_costs_the_cache_alone(files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        files.write(tail_key(), LAST)
    assert files.read(tail_key(), 0, 10) is None
    assert not list(files._folder.glob("*/*"))
    blocks, store = Blocks(), Store()
    blocks.configure(0, files)
    assert blocks.read([Piece(store, INFO, 3, 4)]) == [DATA[3:7]]
    settled(blocks)


def test_a_disk_that_fails_costs_the_cache_alone(files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call on the folder fails, as a disk does that no longer answers."""
    files.write(tail_key(), LAST)
    asked = []

    def failing(real: Any) -> Any:
        def call(path: Any, *more: Any, **options: Any) -> Any:
            if str(path).startswith(str(files._folder)):
                asked.append(path)
                raise OSError(errno.EIO, "Input/output error", str(path))
            return real(path, *more, **options)

        return call

    for name in ("stat", "open", "scandir", "mkdir", "unlink"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    blocks, store = Blocks(), Store()
    blocks.configure(0, files)
    blocks.read_ahead([Piece(store, INFO, 3, 4)])
    assert blocks.read([Piece(store, INFO, 3, 4), Piece(store, INFO, 90, 4)]) == [DATA[3:7], DATA[90:94]]
    settled(blocks)
    assert asked


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(DatasetError, match="others may write to it"):
        BlockFiles(folder, 1 << 30)


def test_a_new_folder_is_its_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        BlockFiles(tmp_path / "new", 1 << 30)
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("kind", "is_network"),
    [
        ("nfs4", True),
        ("fuse.glusterfs", True),
        ("lustre", True),
        ("ext4", False),
        ("tmpfs", False),
        ("fuse.ext2", False),
    ],
)
def test_a_folder_on_a_network_file_system_is_used_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, is_network: bool
) -> None:
    """The folder's own mount decides, not that of a folder above it; its name may have spaces."""
    point = tmp_path / "home of all"
    point.mkdir()
    mounts = tmp_path / "mounts"
    escaped = str(point).replace(" ", "\\040")
    above = "ext4" if is_network else "nfs4"
    mounts.write_text(f"a {tmp_path} {above} rw 0 0\nserver:/home {escaped} {kind} rw 0 0\nb {point}s {above} rw 0 0\n")
    monkeypatch.setattr(block_files, "_MOUNTS", mounts)
    files = BlockFiles(point / "blocks", 1 << 30)
    said = f"--block-cache-dir {point / 'blocks'} is on a network file system ({kind}); a local disk is faster"
    assert caplog.messages == [said] * is_network
    files.write(tail_key(), LAST)
    assert files.read(tail_key(), 5, 100) == LAST[5:105]


def test_caches_of_one_folder_keep_to_what_each_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two caches of other stores, and the second one may take less; both are told what the other one wrote."""
    monkeypatch.setattr(block_files, "LOOK_EVERY_S", 0.0)
    mosts = {"s3://one": 3 * BLOCK_BYTES + BLOCK_BYTES // 2, "s3://two": 2 * BLOCK_BYTES + BLOCK_BYTES // 2}
    caches = {store: BlockFiles(tmp_path / "b", most) for store, most in mosts.items()}
    for number in range(4):
        for store, files in caches.items():
            key = whole_key(number)._replace(store=store)
            data = bytes([number + len(store)]) * BLOCK_BYTES
            files.write(key, data)
            assert files.read(key, 0, BLOCK_BYTES) == data
            for other in caches:
                found = files.read(whole_key(number)._replace(store=other), 10, 50)
                assert found in (None, bytes([number + len(other)]) * 50)
            used = sum(path.stat().st_size for path in (tmp_path / "b").glob("*/*.block"))
            assert used <= mosts[store]


WRITER = """
import sys
from pathlib import Path
from unittest.mock import Mock
from dataserver.dataset.storage.block_files import BlockFiles
from dataserver.dataset.storage.client_interface import ObjectInfo
from dataserver.dataset.storage.pieces import BLOCK_BYTES, BlockKey
files = BlockFiles(Path(sys.argv[1]), 1 << 30)
print("ready", flush=True)
number = 0
while True:
    info = ObjectInfo(f"{number % 20}.tar", BLOCK_BYTES, "v", 0)
    files.write(BlockKey("s3://b", info, 0), bytes([number % 20]) * BLOCK_BYTES)
    number += 1
"""


def test_a_writer_that_is_killed_leaves_whole_files_or_none(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    for delay in (0.0, 0.013, 0.041):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
        files = BlockFiles(folder, 1 << 30)
        for number in range(20):
            key = BlockKey("s3://b", ObjectInfo(f"{number}.tar", BLOCK_BYTES, "v", 0), 0)
            found = files.read(key, 0, BLOCK_BYTES)
            assert found is None or found == bytes([number]) * BLOCK_BYTES
