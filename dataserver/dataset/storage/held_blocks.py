"""Blocks in memory, up to a number of bytes.

Blocks that no job needs soon go first, then those that were served whole, then the least recently used.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from dataserver.dataset.storage.needed_blocks import Needs
from dataserver.dataset.storage.pieces import BlockKey

USED_UP: Final = 0.85
"""The part of a block that was served when it is among the first to go: the rest are headers and texts."""


@dataclass(slots=True)
class _Held:
    data: bytes
    seen: set[int] = field(default_factory=set)
    """Where pieces that were served begin."""
    num_served: int = 0


class HeldBlocks:
    """The blocks in memory. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._used = 0
        self._held: OrderedDict[BlockKey, _Held] = OrderedDict()
        """In the order in which they go, but for those that are needed soon."""
        self.needs = Needs()

    @property
    def used(self) -> int:
        """Bytes of all of them."""
        return self._used

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._held

    def read(self, key: BlockKey, low: int, high: int) -> bytes | None:
        """Return bytes of a block, from its beginning on; None where it is not held."""
        with self._lock:
            held = self._held.get(key)
            if held is None:
                return None
            if low in held.seen and held.num_served >= USED_UP * len(held.data):  # another epoch
                held.seen.clear()
                held.num_served = 0
            if low not in held.seen:
                held.seen.add(low)
                held.num_served += high - low
            self._held.move_to_end(key, last=held.num_served < USED_UP * len(held.data))
        return held.data[low:high]

    def put(self, key: BlockKey, data: bytes) -> None:
        """Hold a block; others go where it needs room."""
        with self._lock:
            if len(data) <= self.most and key not in self._held:
                self._held[key] = _Held(data)
                self._used += len(data)
                self._shrink()

    def resize(self, most: int) -> None:
        """Hold no more than so many bytes."""
        with self._lock:
            self.most = most
            self._shrink()

    def clear(self) -> None:
        """Drop all blocks, and forget who needs them."""
        with self._lock:
            self._held.clear()
            self.needs.clear()
            self._used = 0

    def _shrink(self) -> None:
        while self._used > self.most:
            key = next((key for key in self._held if key not in self.needs), next(iter(self._held)))
            self._used -= len(self._held.pop(key).data)
