"""Memory of the streams: how much they may hold, and buffers that are reused, which saves page faults."""

import mmap
import threading
from collections import deque

import numpy as np
from numpy.typing import NDArray

Buffer = NDArray[np.uint8]

_SMALLEST_CLASS = 1 << 16
_MAX_FREE_BUFFERS = 256


def size_class(num_bytes: int) -> int:
    """The capacity of a buffer for that many bytes: four classes to each power of two, at most a quarter is wasted."""
    if num_bytes <= _SMALLEST_CLASS:
        return _SMALLEST_CLASS
    quarter = 1 << ((num_bytes - 1).bit_length() - 3)
    return -(-num_bytes // quarter) * quarter


class BufferPool:
    """Byte buffers by size class. A fresh buffer costs a page fault per 4 KiB, four times a warm copy.

    It keeps no more than the budget has left, so that what is granted and what is kept do not exceed it together; but
    one buffer, the one returned last, it always keeps. Who is granted memory that is not from here has it `trim`.
    """

    def __init__(self, budget: "ByteBudget") -> None:
        self._budget = budget
        self._lock = threading.Lock()
        """The budget's is taken under it."""
        self._free: deque[Buffer] = deque()
        self._free_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes of freed buffers that wait for reuse."""
        with self._lock:
            return self._free_bytes

    def take(self, num_bytes: int) -> Buffer:
        """A buffer of `size_class(num_bytes)` bytes that were granted, or need not be, with arbitrary content.

        Raises:
            MemoryError: the system has none left.
        """
        capacity = size_class(num_bytes)
        with self._lock:
            for i in range(len(self._free) - 1, -1, -1):
                if self._free[i].nbytes == capacity:
                    buffer = self._free[i]
                    del self._free[i]
                    self._free_bytes -= capacity
                    return buffer
            self._drop(self._budget.left)
        return _mapped(capacity)

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back that nobody reads or writes any more; the ones returned longest ago are dropped first.

        This one stays in any case: without a budget a lone stream uses it again.
        """
        with self._lock:
            self._drop(self._budget.left - buffer.nbytes)
            self._free.append(buffer)
            self._free_bytes += buffer.nbytes

    def trim(self) -> None:
        """Let go of what is kept beyond what the budget has left."""
        with self._lock:
            self._drop(self._budget.left)

    def _drop(self, limit: int) -> None:
        """Let go of all that is kept beyond so many bytes."""
        while self._free and (self._free_bytes > limit or len(self._free) >= _MAX_FREE_BUFFERS):
            self._free_bytes -= self._free.popleft().nbytes


def _mapped(num_bytes: int) -> Buffer:
    """Fresh memory that goes back to the system with its buffer: in the heap it leaves gaps that nothing else fits."""
    try:
        return np.frombuffer(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes for a microbatch: {error.strerror}") from error


class ByteBudget:
    """Bytes that all streams share for working ahead. Nothing waits here: what is not granted is asked for again."""

    def __init__(self, total: int, beside: int = 0, for_microbatches: int = 1 << 62) -> None:
        """Nothing is granted yet.

        Args:
            total: bytes.
            for_microbatches: bytes that streams may reserve for a microbatch each, which the budget does not count.
            beside: of them, what each open account's stream takes beside microbatches; at most half of its share.
        """
        self.total = total
        self._beside = beside
        self._lock = threading.Lock()
        self._used = 0
        self._accounts = 0
        self._unreserved = for_microbatches
        """Bytes for microbatches that no stream has reserved."""

    @property
    def used(self) -> int:
        """Bytes that are granted at present."""
        with self._lock:
            return self._used

    @property
    def left(self) -> int:
        """Bytes that could be granted at present."""
        with self._lock:
            return self._left()

    @property
    def share(self) -> int:
        """Bytes of microbatches that each open account may hold; if none is open, what the first one could."""
        with self._lock:
            return self._share()

    def open(self) -> "Account":
        """The account of a new stream."""
        with self._lock:
            self._accounts += 1
        return Account(self)

    def _grant(self, held: int, num_bytes: int) -> bool:
        with self._lock:
            # The account that asks is open (`MicrobatchStream.close`), so there is at least one.
            fair = held == 0 or held + num_bytes <= self._share()
            if not fair or num_bytes > self._left():
                return False
            self._used += num_bytes
            return True

    def _share(self) -> int:
        return self.total // max(1, self._accounts) - self._taken_beside()

    def _left(self) -> int:
        return self.total - self._accounts * self._taken_beside() - self._used

    def _taken_beside(self) -> int:
        """Bytes that each stream may take beside its microbatches."""
        return min(self._beside, self.total // max(1, self._accounts) // 2)

    def _return(self, num_bytes: int) -> None:
        with self._lock:
            self._used -= num_bytes

    def _reserve(self, num_bytes: int) -> bool:
        with self._lock:
            granted = num_bytes <= self._unreserved
            self._unreserved -= num_bytes if granted else 0
            return granted

    def _close(self, reserved: int) -> None:
        with self._lock:
            self._accounts -= 1
            self._unreserved += reserved


class Account:
    """What one stream holds of the budget: its share of it, or one microbatch where that is more than the share."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._held = 0
        self._reserved = 0
        self._closed = False

    def reserve(self, num_bytes: int) -> bool:
        """Reserve memory for a microbatch of this stream until it is closed; False where there is none left."""
        with self._lock:
            more = 0 if self._closed else max(0, num_bytes - self._reserved)
            granted = self._budget._reserve(more)
            self._reserved += more if granted else 0
            return granted

    def take(self, num_bytes: int) -> bool:
        """Take bytes if there are any left for this stream."""
        with self._lock:  # then the budget's: the only place where both are held
            granted = self._budget._grant(self._held, num_bytes)
            self._held += num_bytes if granted else 0
            return granted

    def give(self, num_bytes: int) -> None:
        """Give bytes back to the budget."""
        with self._lock:
            self._held -= num_bytes
        # Between the two, the budget counts bytes that no account holds; it never counts too few.
        self._budget._return(num_bytes)

    def exceeds_share(self, num_bytes: int) -> bool:
        """Whether more is held than this stream's share, which others made smaller, and than this one microbatch."""
        with self._lock:
            return self._held > max(num_bytes, self._budget.share)

    def close(self) -> None:
        """Leave the sharing; what is still held is given back as it becomes free."""
        with self._lock:
            self._closed = True
            self._budget._close(self._reserved)
