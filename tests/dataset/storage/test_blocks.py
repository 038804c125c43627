"""Blocks in memory: what is read, held and needed."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import takewhile
from unittest.mock import Mock

import pytest
from dataset.storage.objects import DATA, INFO, Store, settled, tail_key, whole_key
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.dataset.storage.block_files import BlockFiles
from dataserver.dataset.storage.blocks import READING, BlockCounts, Blocks
from dataserver.dataset.storage.client_interface import ObjectInfo, UnavailableError
from dataserver.dataset.storage.held_blocks import HeldBlocks
from dataserver.dataset.storage.needed_blocks import NEEDED_S, Needs
from dataserver.dataset.storage.pieces import BLOCK_BYTES, BlockKey, Piece, runs
from dataserver.tracing import Context, outgoing, within


def test_a_block_that_fails_by_a_fault_of_ours_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocks, store = Blocks(), Store()
    monkeypatch.setattr(blocks.held, "put", lambda *_: 1 // 0)
    assert blocks.read([Piece(store, INFO, 5, 10)]) == [DATA[5:15]]
    settled(blocks)
    assert "block 0 of s3://bucket/a.tar cannot be read" in caplog.text
    assert "ZeroDivisionError" in caplog.text


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
    for future in blocks.coming([piece]):
        future.result(60)
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
    monkeypatch.setattr("dataserver.dataset.storage.needed_blocks.monotonic", lambda: now[0])
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


def test_a_file_that_is_collected_by_who_has_the_lock_of_needs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of blocks is free where that of needs is waited for: whoever has this one may collect a file."""
    going_on, blocks, hanging = threading.Event(), Blocks(), Store()
    monkeypatch.setattr(hanging, "get", lambda *_: bytes(going_on.wait(60)))
    asked = [blocks.read_whole(whole_key(number), hanging, is_held=True) for number in range(READING + 1)]
    held_up, fit = list[bool](), blocks.held.needs.fit

    def collecting(key: BlockKey, capacity: int) -> bool:
        other = threading.Thread(target=asked[-1].cancel, daemon=True)
        other.start()
        other.join(2)
        held_up.append(other.is_alive())
        return fit(key, capacity)

    monkeypatch.setattr(blocks.held.needs, "fit", collecting)
    assert blocks._want_block(tail_key(), Store())
    going_on.set()
    settled(blocks)
    assert asked[-1].cancelled()
    assert held_up[0] is False


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
