"""Blocks that another server owns: asked for there, held there alone, and read from the store where it fails."""

import time
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.dataset.storage.blocks import BlockCounts, Blocks
from dataserver.dataset.storage.client_interface import ObjectInfo
from dataserver.dataset.storage.pieces import BLOCK_BYTES, BlockKey, Piece

INFO = ObjectInfo("a.tar", 6 * BLOCK_BYTES, '"v"', 0)


def byte_of(number: int) -> int:
    return number * 37 % 251


class Store:
    """An object whose bytes tell their block."""

    name = "s3://bucket"

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def get(self, wanted: ObjectInfo, start: int, length: int) -> bytes:  # noqa: ARG002
        self.asked.append((start, length))
        numbers = range(start // BLOCK_BYTES, (start + length - 1) // BLOCK_BYTES + 1)
        whole = b"".join(bytes([byte_of(n)]) * BLOCK_BYTES for n in numbers)
        return whole[start % BLOCK_BYTES : start % BLOCK_BYTES + length]


class Odd:
    """Another server owns all blocks of odd numbers."""

    def __init__(self, other: Blocks) -> None:
        self.other = other
        self.calls: list[int] = []
        self.failing = False

    def owner(self, key: BlockKey) -> str | None:
        return "other" if key.number % 2 else None

    def fetch(self, owner: str, pieces: Sequence[Piece]) -> list[bytes]:
        assert owner == "other"
        self.calls.append(len(pieces))
        if self.failing:
            raise OSError(5, "it is gone")
        return self.other.read(pieces, for_peer=True)


def settle(*servers: Blocks) -> None:
    """Wait for blocks that load, and for what was read ahead and not waited for: that counts, too."""
    before: list[BlockCounts] = []
    while any(blocks._loading for blocks in servers) or [blocks.counts for blocks in servers] != before:
        before = [replace(blocks.counts) for blocks in servers]
        time.sleep(0.05)


PIECES = st.lists(st.tuples(st.integers(0, INFO.num_bytes - 1), st.integers(1, 3000)), min_size=1, max_size=30)


@settings(max_examples=24)
@given(PIECES, st.booleans())
def test_pieces_are_right_whoever_has_them(ranges: list[tuple[int, int]], failing: bool) -> None:
    store, here, there = Store(), Blocks(), Blocks()
    odd = Odd(there)
    odd.failing = failing
    here.use_owners(odd)
    pieces = [Piece(store, INFO, start, min(length, INFO.num_bytes - start)) for start, length in ranges]
    expected = [Store().get(INFO, piece.start, piece.length) for piece in pieces]
    here.read_ahead(pieces)
    assert here.read(pieces) == expected
    settle(here, there)
    assert here.read(pieces) == expected
    assert all(BlockKey(store.name, INFO, n) not in here.held for n in (1, 3, 5))


def test_a_microbatch_is_one_call_to_each_owner() -> None:
    store, here, there = Store(), Blocks(), Blocks()
    odd = Odd(there)
    here.use_owners(odd)
    pieces = [Piece(store, INFO, start, 1000) for start in range(0, INFO.num_bytes - 1000, BLOCK_BYTES // 2)]
    here.read_ahead(pieces)
    here.read(pieces)
    assert odd.calls == [6]
    settle(here, there)
    before = here.counts.memory_bytes + there.counts.memory_bytes
    here.read(pieces)
    assert odd.calls == [6, 6]
    assert here.counts.memory_bytes + there.counts.memory_bytes - before == 1000 * len(pieces)
    assert here.held.used == there.held.used == 3 * BLOCK_BYTES


def test_a_server_that_is_asked_by_another_one_asks_no_further() -> None:
    store, here = Store(), Blocks()
    odd = Odd(here)
    here.use_owners(odd)
    assert here.read([Piece(store, INFO, BLOCK_BYTES, 9)], for_peer=True) == [bytes([byte_of(1)]) * 9]
    assert odd.calls == []


def test_a_server_reads_its_own_blocks_ahead_alone() -> None:
    store, here, there = Store(), Blocks(), Blocks()
    here.use_owners(Odd(there))
    here.need("job", [(BlockKey(store.name, INFO, number), store) for number in range(6)])
    settle(here, there)
    assert sorted(start // BLOCK_BYTES for start, _ in store.asked) == [0, 2, 4]


def test_a_piece_in_two_blocks_is_asked_of_both_owners() -> None:
    store, here, there = Store(), Blocks(), Blocks()
    here.use_owners(Odd(there))
    across = Piece(store, INFO, BLOCK_BYTES - 10, 30)
    for ahead in (True, False):
        if ahead:
            here.read_ahead([across])
        assert here.read([across]) == [bytes([byte_of(0)]) * 10 + bytes([byte_of(1)]) * 20]
    settle(here, there)
    keys = [BlockKey(store.name, INFO, number) for number in (0, 1)]
    assert [key in here.held for key in keys] == [True, False]
    assert [key in there.held for key in keys] == [False, True]
