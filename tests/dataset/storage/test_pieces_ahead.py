"""Pieces that were read ahead: what failed holds up nobody once it can be had."""

import time
import weakref
from concurrent.futures import Future

import pytest

from dataserver.dataset.storage.blocks import Blocks
from dataserver.dataset.storage.client_interface import ObjectInfo, UnavailableError
from dataserver.dataset.storage.pieces import BLOCK_BYTES, BlockKey, Piece
from dataserver.dataset.storage.pieces_ahead import waited_for

DATA = bytes(range(256)) * (BLOCK_BYTES // 256)
INFO = ObjectInfo("a.tar", len(DATA), '"v1"', 0)


class Store:
    """An object in memory, of a store that may be away."""

    name = "s3://bucket"

    def __init__(self) -> None:
        self.failing = False

    def get(self, _wanted: ObjectInfo, start: int, length: int) -> bytes:
        if self.failing:
            raise UnavailableError("503")
        return DATA[start : start + length]


def test_what_failed_ahead_is_waited_for_no_longer_once_its_block_is_held() -> None:
    store, blocks = Store(), Blocks()
    piece = Piece(store, INFO, 5, 10)
    store.failing = True
    blocks.read_ahead([piece])
    until = time.monotonic() + 60
    while blocks._loading and time.monotonic() < until:
        time.sleep(0.01)
    (failed,) = blocks.coming([piece])
    assert isinstance(failed.exception(60), UnavailableError)
    store.failing = False
    blocks.held.put(BlockKey(store.name, INFO, 0), DATA)
    blocks.read_ahead([piece])
    assert blocks.coming([piece]) == []
    assert blocks.read([piece]) == [DATA[5:15]]


@pytest.mark.usefixtures("no_collection")
def test_what_failed_ahead_holds_nothing_of_who_waited_for_it() -> None:
    class Buffer:
        """What a caller holds."""

    def wait() -> "weakref.ref[Buffer]":
        buffer, future = Buffer(), Future[bytes]()
        future.set_exception(UnavailableError("503"))
        assert waited_for(Piece(Store(), INFO, 5, 10), future) is None
        return weakref.ref(buffer)

    assert wait()() is None
