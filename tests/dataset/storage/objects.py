"""An object in memory, and the blocks of it and of others."""

import time

import numpy as np

from dataserver.dataset.storage.blocks import Blocks
from dataserver.dataset.storage.client_interface import ObjectInfo, UnavailableError
from dataserver.dataset.storage.pieces import BLOCK_BYTES, BlockKey

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


def tail_key(number: int = 2) -> BlockKey:
    return BlockKey("s3://bucket", INFO, number)


def whole_key(number: int) -> BlockKey:
    """The first block of one of many objects."""
    return BlockKey("s3://bucket", INFO._replace(key=f"{number}.tar"), 0)
