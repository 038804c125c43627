"""Blocks in memory, up to a number of bytes.

Blocks that no job needs soon go first, then those that were served whole, then the least recently used.
"""

import threading
from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from dataserver.dataset.storage.pieces import BlockKey

USED_UP: Final = 0.85
"""The part of a block that was served when it is among the first to go: the rest are headers and texts."""
NEEDED_S: Final = 120.0
"""A job that says nothing for so long is over, or waits: others' blocks come first."""


@dataclass(slots=True)
class _Held:
    data: bytes
    seen: set[int] = field(default_factory=set)
    """Where pieces that were served begin."""
    num_served: int = 0


@dataclass(frozen=True, slots=True)
class _Need:
    """What a job needs now and soon."""

    keys: Set[BlockKey]
    begun: set[BlockKey]
    """Those that were begun to be read ahead."""
    until: float
    """When that is forgotten, on the monotonic clock."""


class HeldBlocks:
    """The blocks. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._used = 0
        self._held: OrderedDict[BlockKey, _Held] = OrderedDict()
        """In the order in which they go, but for those that are needed soon."""
        self._needed: dict[str, _Need] = {}
        """By job."""

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

    def need(self, job: str, keys: Set[BlockKey]) -> tuple[int, set[BlockKey]]:
        """Hold on to the blocks that a job needs now and soon, if there is room for them.

        Args:
            job: names the job; what it needed before counts no longer.
            keys: of the blocks.

        Returns:
            Bytes that are free or that no job needs, and those of the blocks whose reading was begun for this job. Who
            begins another one adds it, so that each is begun once.
        """
        now = monotonic()
        with self._lock:
            before = self._needed.pop(job, None)
            begun = set() if before is None else before.begun & keys
            self._needed = {of: need for of, need in self._needed.items() if need.until > now}
            self._needed[job] = _Need(keys, begun, now + NEEDED_S)
            return self.most - sum(len(held.data) for key, held in self._held.items() if self._is_needed(key)), begun

    def resize(self, most: int) -> None:
        """Hold no more than so many bytes."""
        with self._lock:
            self.most = most
            self._shrink()

    def clear(self) -> None:
        """Hold nothing."""
        with self._lock:
            self._held.clear()
            self._needed.clear()
            self._used = 0

    def _is_needed(self, key: BlockKey) -> bool:
        return any(key in need.keys for need in self._needed.values())

    def _shrink(self) -> None:
        while self._used > self.most:
            key = next((key for key in self._held if not self._is_needed(key)), next(iter(self._held)))
            self._used -= len(self._held.pop(key).data)
