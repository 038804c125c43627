"""Blocks in memory and on a disk: never a wrong byte, whatever becomes of their files."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.dataset import DatasetError
from dataserver.dataset.storage import block_files
from dataserver.dataset.storage.block_files import CHUNK_BYTES, BlockFiles
from dataserver.dataset.storage.blocks import READING, BlockCounts, Blocks
from dataserver.dataset.storage.clients import ObjectInfo, UnavailableError
from dataserver.dataset.storage.held_blocks import HeldBlocks
from dataserver.dataset.storage.needs import NEEDED_S, Needs
from dataserver.dataset.storage.pieces import BLOCK_BYTES, BlockKey, Piece, runs
from dataserver.tracing import Context, outgoing, within

DATA = np.random.default_rng(0).integers(0, 256, 2 * BLOCK_BYTES + 12345, np.uint8).tobytes()
INFO = ObjectInfo("a.tar", len(DATA), '"v1"', 0)


class Store:
    """An object in memory, which notes what it is asked for."""

    name = "s3://bucket"

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.failing = False

    def get(self, wanted: ObjectInfo, start: int, length: int) -> bytes:
        if self.failing:
            raise UnavailableError("503")
        assert wanted == INFO
        assert 0 <= start < start + length <= len(DATA)
        self.asked.append((start, length))
        return DATA[start : start + length]


def settled(blocks: Blocks) -> None:
    """Wait until nothing is read any more."""
    until = time.monotonic() + 60
    while blocks._loading and time.monotonic() < until:
        time.sleep(0.01)
    assert not blocks._loading


def test_a_block_that_fails_by_a_fault_of_ours_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocks, store = Blocks(), Store()
    monkeypatch.setattr(blocks.held, "put", lambda *_: 1 // 0)
    assert blocks.read([Piece(store, INFO, 5, 10)]) == [DATA[5:15]]
    settled(blocks)
    assert "block 0 of s3://bucket/a.tar cannot be read" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def tail_key(number: int = 2) -> BlockKey:
    return BlockKey("s3://bucket", INFO, number)


RANGES = st.lists(st.tuples(st.integers(0, len(DATA) - 1), st.integers(1, 300_000)), min_size=1, max_size=12)


@settings(max_examples=40)
@given(RANGES, st.booleans(), st.sampled_from([0, BLOCK_BYTES, 3 * BLOCK_BYTES]))
def test_pieces_are_the_bytes_of_the_object(ranges: list[tuple[int, int]], ahead: bool, memory_bytes: int) -> None:
    store, blocks = Store(), Blocks()
    blocks.configure(memory_bytes)
    pieces = [Piece(store, INFO, start, min(length, len(DATA) - start)) for start, length in ranges]
    if ahead:
        blocks.read_ahead(pieces)
    for _ in range(2):
        assert blocks.read(pieces) == [DATA[piece.start : piece.end] for piece in pieces]
    settled(blocks)
    assert blocks.held.used <= memory_bytes


def test_a_block_is_read_once_and_serves_all_of_its_pieces() -> None:
    store, blocks = Store(), Blocks()
    blocks.read([Piece(store, INFO, 100, 50)])
    settled(blocks)
    store.asked.clear()
    assert blocks.read([Piece(store, INFO, start, 1000) for start in range(0, BLOCK_BYTES - 1000, 50_000)])
    assert store.asked == []
    assert blocks.counts.piece_requests <= 1
    assert blocks.counts.store_requests == blocks.counts.piece_requests + 1


def test_what_was_read_ahead_is_taken_and_what_failed_then_is_read_again() -> None:
    store, blocks = Store(), Blocks()
    blocks.configure(0)
    pieces = [Piece(store, INFO, start, 1000) for start in (0, 10**6, 2 * 10**6)]
    store.failing = True
    blocks.read_ahead(pieces)
    time.sleep(0.1)
    store.failing = False
    assert blocks.read(pieces[:1]) == [DATA[:1000]]
    blocks.read_ahead(pieces[1:2])
    assert blocks.read(pieces[1:2]) == [DATA[10**6 : 10**6 + 1000]]
    assert store.asked.count((10**6, 1000)) == 1
    store.failing = True
    with pytest.raises(UnavailableError):
        blocks.read([Piece(store, INFO, 5, 5)])


def test_what_is_forgotten_is_read_again() -> None:
    store, blocks = Store(), Blocks()
    blocks.configure(0)
    piece = Piece(store, INFO, 5, 1000)
    blocks.read_ahead([piece])
    until = time.monotonic() + 60
    while not store.asked and time.monotonic() < until:
        time.sleep(0.01)
    assert store.asked == [(5, 1000)]
    blocks.forget()
    store.asked.clear()
    assert blocks.read([piece]) == [DATA[5:1005]]
    assert store.asked == [(5, 1000)]


def test_pieces_close_together_are_asked_for_together() -> None:
    store = Store()
    pieces = [Piece(store, INFO, start, 50_000) for start in range(0, 10**6, 60_000)]
    assert [len(run) for run in runs(pieces)] == [len(pieces)]
    distant = [Piece(store, INFO, start, 1000) for start in (0, 200_000, 400_000)]
    assert [len(run) for run in runs(distant)] == [1, 1, 1]


def test_blocks_of_which_all_was_served_go_first() -> None:
    held = HeldBlocks(2 * BLOCK_BYTES)
    for number in range(2):
        held.put(tail_key(number), DATA[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
    held.read(tail_key(1), 0, BLOCK_BYTES)
    held.read(tail_key(0), 0, 10)
    held.put(tail_key(2), DATA[2 * BLOCK_BYTES :])
    assert [number for number in range(3) if tail_key(number) in held] == [0, 2]


def test_what_is_served_twice_before_the_rest_counts_once() -> None:
    held, ends = HeldBlocks(2 * BLOCK_BYTES), [0, BLOCK_BYTES // 2, BLOCK_BYTES * 4 // 5, BLOCK_BYTES]
    for number in range(2):
        held.put(tail_key(number), DATA[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
    for part in (0, 1, 0, 2):
        held.read(tail_key(0), ends[part], ends[part + 1])
    held.put(tail_key(2), DATA[2 * BLOCK_BYTES :])
    assert [number for number in range(3) if tail_key(number) in held] == [1, 2]


def whole_key(number: int) -> BlockKey:
    """The first block of one of many objects."""
    return BlockKey("s3://bucket", INFO._replace(key=f"{number}.tar"), 0)


def need(needs: Needs, job: str, keys: Iterable[BlockKey], capacity: int = 2 * BLOCK_BYTES) -> list[BlockKey]:
    """Tell what a job needs until there is no room, and return what there was room for."""
    with needs.told(job, capacity) as told:
        return list(takewhile(told.add, keys))


def test_blocks_that_a_job_needs_stay_and_the_others_go_first() -> None:
    held = HeldBlocks(2 * BLOCK_BYTES)
    for number in range(2):
        held.put(tail_key(number), DATA[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
    held.read(tail_key(0), 0, BLOCK_BYTES)
    needed = [tail_key(0), tail_key(2), tail_key(0)]
    assert need(held.needs, "job", needed) == needed
    held.put(tail_key(2), DATA[2 * BLOCK_BYTES :])
    assert [number for number in range(3) if tail_key(number) in held] == [0, 2]


def test_what_a_job_said_is_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("dataserver.dataset.storage.needs.monotonic", lambda: now[0])
    needs, one, other = Needs(), whole_key(0), whole_key(1)
    need(needs, "a", [one], BLOCK_BYTES)
    assert not needs.fit(other, BLOCK_BYTES)
    now[0] = NEEDED_S / 2
    assert need(needs, "b", [one, other], BLOCK_BYTES) == [one]
    now[0] = NEEDED_S + 1
    assert not needs.fit(other, BLOCK_BYTES)
    now[0] = NEEDED_S * 2
    assert needs.fit(other, BLOCK_BYTES)
    assert one not in needs


def test_jobs_get_an_equal_part_of_the_room_and_no_more_than_there_is() -> None:
    needs, keys = Needs(), [whole_key(number) for number in range(8)]
    assert need(needs, "a", keys[:4]) == keys[:2]
    assert need(needs, "b", keys[4:]) == keys[4:5]
    assert need(needs, "a", keys[:4]) == keys[:1]
    for _ in range(3):  # jobs that need the same have all of the room together
        assert need(needs, "b", keys) == keys[:2]
        assert need(needs, "a", keys) == keys[:2]
        assert needs._num_bytes == 2 * BLOCK_BYTES
    needs.clear()
    assert need(needs, "b", keys[4:]) == keys[4:6]


def test_an_image_of_a_block_that_would_not_be_held_is_read_alone() -> None:
    store, blocks = Store(), Blocks()
    blocks.configure(BLOCK_BYTES)
    blocks.need("job", [(tail_key(0), store)])
    settled(blocks)
    store.asked.clear()
    for start in range(BLOCK_BYTES, 2 * BLOCK_BYTES - 1000, 400_000):
        assert blocks.read([Piece(store, INFO, start, 1000)]) == [DATA[start : start + 1000]]
        settled(blocks)
    assert {length for _, length in store.asked} == {1000}
    assert tail_key(0) in blocks.held


def test_what_a_job_needs_is_looked_for_while_there_is_room_alone() -> None:
    store, blocks = Store(), Blocks()
    blocks.configure(BLOCK_BYTES)
    numbers = iter(range(3))
    blocks.need("job", ((tail_key(number), store) for number in numbers))
    assert next(numbers) == 2


def test_a_block_that_nobody_needs_any_more_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store, blocks = Store(), Blocks()
    blocks.configure(BLOCK_BYTES)
    begun: list[Callable[[], object]] = []

    def submit(function: Callable[..., object], *given: object) -> "Future[object]":
        begun.append(partial(function, *given))
        return Future()

    monkeypatch.setattr(blocks._loaders.of(store.name), "submit", submit)
    for number in (0, 1):
        blocks.need("job", [(tail_key(number), store)])
    for load in begun:
        load()
    assert store.asked == [(BLOCK_BYTES, BLOCK_BYTES)]


def test_a_block_that_was_served_whole_counts_anew_in_the_next_epoch() -> None:
    held = HeldBlocks(2 * BLOCK_BYTES)
    for number in range(2):
        held.put(tail_key(number), DATA[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
    for length in (BLOCK_BYTES, 10):
        held.read(tail_key(1), 0, length)  # the second time is in another epoch, as the first served it whole
        held.read(tail_key(0), 0, 10)
    held.read(tail_key(1), 100, 10)
    held.put(tail_key(2), DATA[2 * BLOCK_BYTES :])
    assert [number for number in range(3) if tail_key(number) in held] == [1, 2]


def test_what_ranks_need_that_are_behind_is_held_and_not_read() -> None:
    store, blocks = Store(), Blocks()
    blocks.configure(2 * BLOCK_BYTES)
    first, second, third = ((tail_key(number), store) for number in range(3))
    blocks.need("job", [first])
    settled(blocks)
    store.asked.clear()
    blocks.need("job", [second], behind=[third, first])
    settled(blocks)
    assert [start // BLOCK_BYTES for start, _ in store.asked] == [1]
    blocks.held.read(first[0], 0, BLOCK_BYTES)  # what was served whole goes first, unless it is needed
    blocks.held.put(third[0], DATA[2 * BLOCK_BYTES :])
    assert [key in blocks.held for key, _ in (first, second, third)] == [True, True, False]


def test_what_is_held_for_ranks_behind_is_looked_for_on_the_disk_once_and_among_own_blocks(files: BlockFiles) -> None:
    """Windows have very many blocks, and most of what ranks need that are behind is needed by the first one, too."""
    store, blocks, looked = Store(), Blocks(), list[BlockKey]()
    has = files.has
    blocks.configure(0, files)
    for number in range(3):
        files.write(whole_key(number), DATA[:BLOCK_BYTES])
    blocks.use_owners(Mock(owner=lambda key: "other" if key == whole_key(2) else None))
    files.has = lambda key: looked.append(key) or has(key)  # type: ignore[method-assign, func-returns-value]
    ahead, behind = [(whole_key(0), store)], [(whole_key(number), store) for number in range(3)]
    blocks.need("job", ahead, behind)
    settled(blocks)
    assert Counter(looked) == {whole_key(0): 1, whole_key(1): 1}, "the first when it was to be loaded"
    assert set(blocks.held.needs.keys()) == {whole_key(0), whole_key(1)}


def test_a_file_that_is_collected_while_blocks_are_counted_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it asked for is cancelled wherever it is collected, such as by a thread that has the lock of blocks."""
    going_on, blocks, hanging = threading.Event(), Blocks(), Store()
    asked, found, add = list["Future[bytes]"](), list[list[bytes]](), BlockCounts.add
    monkeypatch.setattr(hanging, "get", lambda *_: bytes(going_on.wait(60)))

    def collected(counts: BlockCounts, added: Mapping[str, int]) -> None:
        asked[-1].cancel()
        add(counts, added)

    def read() -> None:
        for number in range(READING + 1):
            asked.append(blocks.read_whole(whole_key(number), hanging, is_held=True))
        found.append(blocks.read([Piece(Store(), tail_key().info, 5, 10)]))

    monkeypatch.setattr(BlockCounts, "add", collected)
    blocks.held.put(tail_key(0), DATA[:BLOCK_BYTES])
    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(10)
    going_on.set()
    assert found == [[DATA[5:15]]]
    assert asked[-1].cancelled()


def test_blocks_are_read_before_they_are_wanted_each_once_and_as_far_as_there_is_room() -> None:
    store, blocks = Store(), Blocks()
    blocks.configure(2 * BLOCK_BYTES)
    needed = [(tail_key(number), store) for number in (1, 0, 2)]
    blocks.need("job", needed)
    settled(blocks)
    assert sorted(start // BLOCK_BYTES for start, _ in store.asked) == [0, 1]
    store.asked.clear()
    assert blocks.read([Piece(store, INFO, 5, 100)]) == [DATA[5:105]]
    blocks.held.clear()
    blocks.need("job", needed)
    settled(blocks)
    assert len(store.asked) == 2  # held no more, and needed: read again
    blocks.need("job", needed)
    settled(blocks)
    assert len(store.asked) == 2


@pytest.fixture
def files(tmp_path: Path) -> BlockFiles:
    return BlockFiles(tmp_path / "blocks", 1 << 30)


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
from dataserver.dataset.storage.clients import ObjectInfo
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


def test_blocks_that_are_read_ahead_belong_to_no_step() -> None:
    seen: dict[int, object] = {}

    class Traced(Store):
        def get(self, wanted: ObjectInfo, start: int, length: int) -> bytes:
            seen[length] = outgoing()
            return super().get(wanted, start, length)

    blocks = Blocks()
    with within(Context(Mock(), 1, 2)):
        assert blocks.read([Piece(Traced(), INFO, 5, 10)]) == [DATA[5:15]]
    settled(blocks)
    seen.pop(10, None)  # the piece is read alone where its block is not there yet
    assert seen == {BLOCK_BYTES: None}
