"""The places of streams, which the processes that serve one address share.

A place is a byte of an unnamed file, and who has it holds a lock on it. The system gives the locks of a process back
when it ends, however it ends, so no place is ever lost and nobody has to count.
"""

import fcntl
import os
import threading


class Places:
    """So many places for all processes that have the file. Thread-safe."""

    def __init__(self, count: int, descriptor: int | None = None) -> None:
        """Share places.

        Args:
            count: how many places there are.
            descriptor: of the file, the same one in all processes, or None if there is one process.
        """
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._free = list(range(count))
        """Places that no stream of this process has."""

    @staticmethod
    def file() -> int:
        """The descriptor of a new file of places; processes inherit it, and leave it open."""
        return os.memfd_create("places")

    def take(self) -> int | None:
        """A place; None if all are taken."""
        with self._lock:
            free = next((i for i in range(len(self._free) - 1, -1, -1) if self._claim(self._free[i])), None)
            return None if free is None else self._free.pop(free)

    def give(self, place: int) -> None:
        """Give a place back."""
        with self._lock:
            self._free.append(place)
            if self._descriptor is not None:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, place)

    def _claim(self, place: int) -> bool:
        """Whether no other process has a place; from now on this one has it."""
        if self._descriptor is None:
            return True
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except BlockingIOError:
            return False
        return True
