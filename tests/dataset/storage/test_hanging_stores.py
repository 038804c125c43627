"""A store that gives nothing, byte by byte or not at all, keeps no other one waiting."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from dataserver.dataset.storage.blocks import LOADING, READING, Blocks
from dataserver.dataset.storage.client_interface import ObjectInfo
from dataserver.dataset.storage.pieces import BLOCK_BYTES, BlockKey, Piece

INFO = ObjectInfo("a.tar", 4 * READING * BLOCK_BYTES, '"v1"', 0)
WAIT_S = 60


class Store:
    """Zeros."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self, _wanted: ObjectInfo, _start: int, length: int) -> bytes:
        return bytes(length)


class Hanging(Store):
    """Zeros as well, as soon as it goes on."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.going_on = threading.Event()

    def get(self, _wanted: ObjectInfo, _start: int, length: int) -> bytes:
        assert self.going_on.wait(WAIT_S)
        return bytes(length)


class Others:
    """Servers that own all blocks, and wait for their stores as this one does."""

    def owner(self, _key: BlockKey) -> Any:
        return "other"

    def fetch(self, _owner: Any, pieces: Sequence[Piece]) -> list[bytes]:
        return [piece.source.get(piece.info, piece.start, piece.length) for piece in pieces]


class Waiting(Others):
    """Servers that give nothing until they go on."""

    def __init__(self, going_on: threading.Event) -> None:
        self.going_on = going_on

    def fetch(self, owner: Any, pieces: Sequence[Piece]) -> list[bytes]:
        assert self.going_on.wait(WAIT_S)
        return super().fetch(owner, pieces)


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    store = Hanging("s3://hanging")
    yield store
    store.going_on.set()


@pytest.mark.parametrize("in_a_fleet", [False, True])
def test_pieces_of_another_store_are_read(hanging: Hanging, in_a_fleet: bool) -> None:
    blocks, other = Blocks(), Store("s3://other")
    blocks.configure(0)
    blocks.use_owners(Others() if in_a_fleet else None)
    for number in range(2 * READING):
        blocks.read_ahead([Piece(hanging, INFO, number * BLOCK_BYTES, 10)])
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.extend(blocks.read([Piece(other, INFO, 0, 10)])))
    reading.start()
    reading.join(WAIT_S / 2)
    assert found == [bytes(10)]


def test_what_another_server_asks_for_waits_for_no_other_server(hanging: Hanging) -> None:
    """Else two servers that take each other for the owner, as one does that was started again, wait for each other."""
    blocks, piece = Blocks(), Piece(Store("s3://other"), INFO, 0, 10)
    blocks.configure(0)
    blocks.use_owners(Waiting(hanging.going_on))
    blocks.read_ahead([piece])
    found: list[bytes] = []
    asked = threading.Thread(target=lambda: found.extend(blocks.read([piece], for_peer=True)))
    asked.start()
    asked.join(WAIT_S / 2)
    assert found == [bytes(10)]
    (coming,) = blocks.coming([piece])
    hanging.going_on.set()
    assert coming.result(WAIT_S) == bytes(10), "a stream here is given what was read ahead for it"


def test_blocks_of_another_store_are_loaded(hanging: Hanging) -> None:
    blocks, other = Blocks(), Store("s3://other")
    blocks.configure((2 * LOADING + 1) * BLOCK_BYTES)
    keys = [BlockKey(hanging.name, INFO, number) for number in range(2 * LOADING)]
    blocks.need("hanging", [(key, hanging) for key in keys])
    wanted = BlockKey(other.name, INFO, 0)
    blocks.need("other", [(wanted, other)])
    waited = threading.Event()
    for _ in range(20 * WAIT_S):
        if wanted in blocks.held:
            return
        waited.wait(0.05)
    pytest.fail("the block was never read")
