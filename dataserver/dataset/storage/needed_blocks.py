"""Blocks that jobs need now and soon, for which room is reserved."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from dataserver.dataset.storage.pieces import BlockKey

NEEDED_S: Final = 120.0
"""A job that says nothing for so long is over, or waits: others' blocks come first."""


@dataclass(slots=True, eq=False)
class _Need:
    """The blocks that one job needs."""

    until: float
    """When that is forgotten, on the monotonic clock."""
    keys: set[BlockKey] = field(default_factory=set)
    begun: set[BlockKey] = field(default_factory=set)
    """Those that were begun to be read ahead."""
    is_over: bool = False


class Needs:
    """The blocks that jobs need. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, _Need] = {}
        self._counts: Counter[BlockKey] = Counter()
        """How many jobs need a block, those twice that are just telling what they need."""
        self._num_bytes = 0

    def __contains__(self, key: BlockKey) -> bool:
        with self._lock:
            return key in self._counts

    def keys(self) -> list[BlockKey]:
        """Keys of all blocks that are needed."""
        with self._lock:
            return list(self._counts)

    def fit(self, key: BlockKey, capacity: int) -> bool:
        """Whether a block would be held if it were read, where all blocks may take so many bytes."""
        with self._lock:
            self._forget_expired()
            return key in self._counts or self._num_bytes + key.num_bytes <= capacity

    @contextmanager
    def told(self, job: str, capacity: int) -> "Iterator[Telling]":
        """Take down what a job needs from now on. What it needed before counts until all is told.

        Args:
            job: names the job.
            capacity: bytes that all blocks may take. This job gets what the others leave, at least an equal part.
        """
        with self._lock:
            self._forget_expired()
            before = self._of.get(job) or _Need(0.0)
            need = self._of[job] = _Need(monotonic() + NEEDED_S)
            others = sum(key.num_bytes for key, count in self._counts.items() if count > (key in before.keys))
            part = capacity // len(self._of)
        try:
            yield Telling(self, before, need, capacity - others, part)
        finally:
            with self._lock:
                self._end(before)

    def clear(self) -> None:
        """Forget what all jobs need."""
        with self._lock:
            for need in self._of.values():
                self._end(need)
            self._of.clear()

    def add(self, told: "Telling", key: BlockKey) -> bool:
        """Add a need as `told.add`, of a block that is not among those yet."""
        with self._lock:
            is_shared = self._counts[key] > (key in told.before.keys)
            told.left -= 0 if is_shared else key.num_bytes
            told.part -= key.num_bytes
            if told.need.is_over or (told.left < 0 and told.part < 0):
                return False
            told.need.keys.add(key)
            if key in told.before.begun:
                told.need.begun.add(key)
            self._num_bytes += 0 if self._counts[key] else key.num_bytes
            self._counts[key] += 1
            return True

    def _forget_expired(self) -> None:
        now = monotonic()
        for job in [job for job, need in self._of.items() if need.until <= now]:
            self._end(self._of.pop(job))

    def _end(self, need: _Need) -> None:
        if need.is_over:
            return
        need.is_over = True
        for key in need.keys:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                self._num_bytes -= key.num_bytes


@dataclass(slots=True, eq=False)
class Telling:
    """What one job has told so far, by one thread."""

    needs: Needs
    before: _Need
    need: _Need
    left: int
    """Bytes that neither other jobs need nor this one, so far."""
    part: int
    """What is left of an equal part of all bytes."""

    @property
    def begun(self) -> set[BlockKey]:
        """The blocks whose reading was begun for this job; who begins another one adds it, so each is begun once."""
        return self.need.begun

    def __contains__(self, key: BlockKey) -> bool:
        return key in self.need.keys

    def add(self, key: BlockKey) -> bool:
        """Reserve room for another block. Returns whether there is room: where not, nothing more need be told."""
        return key in self.need.keys or self.needs.add(self, key)
