"""Memory for microbatches, used again as soon as no array looks at it.

Fresh memory costs a page fault for every 4 KiB, several times the copy itself, so blocks are recycled. A block may be
recycled only when nothing views it any more. That is known exactly, without counting references: the pool hands out a
numpy array, the lease, whose base is a memoryview of the block. numpy keeps the lease alive as long as any view of it
(a view's base is the lease: numpy follows bases only through plain arrays, and stops at the memoryview), torch and
memoryviews keep the array they were made from. When the lease dies, its finalizer gives the block back.
"""

import mmap
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.plan.views import ALIGNMENT

Bytes = NDArray[np.uint8]
MAPPED_BYTES: Final = 1 << 20
"""Blocks from this size on are mappings of their own, so that dropped ones go back to the system, whatever is kept of
the heap (`allocator.py`)."""
SPARE_TAKES: Final = 32
"""Blocks that this many takes had no need of are dropped."""


class Buffers(Protocol):
    """Memory that microbatches are received into."""

    def take(self, nbytes: int) -> Bytes:
        """Writable, contiguous uint8 [nbytes] whose first byte is aligned to ALIGNMENT."""


class BufferPool:
    """Recycles blocks. Not thread-safe: one thread takes; any thread may drop what was taken.

    What is handed out is not bounded here (a consumer that keeps microbatches must not stop the stream that brings it
    the next one). What lies idle is bounded by `keep_bytes`, or two blocks where these are larger, and by what the last
    microbatches took: a queue that was full once, and has been short since, leaves no blocks behind.
    """

    def __init__(self, keep_bytes: int, allocate: Callable[[int], Bytes] | None = None) -> None:
        if keep_bytes < 0:
            raise ValueError(f"keep_bytes is {keep_bytes}; 0 or more bytes are required")
        self._keep_bytes = keep_bytes
        self._allocate = allocate or aligned_block
        self._idle: list[Bytes] = []
        """Those idle for longest come first."""
        self._takes = 0
        self._spare = 0
        """Fewest blocks that were left idle by any take since the spare ones were dropped last."""
        # A finalizer may run at any allocation of any thread, also within `take`: SimpleQueue.put is reentrant.
        self._returned: SimpleQueue[Bytes] = SimpleQueue()

    def take(self, nbytes: int) -> Bytes:
        """Writable uint8 [nbytes] with arbitrary content; aligned to ALIGNMENT."""
        self._collect()
        fitting = [b for b in self._idle if nbytes <= b.nbytes <= 2 * size_class(nbytes)]
        if fitting:
            block = min(fitting, key=lambda b: b.nbytes)
            self._idle = [b for b in self._idle if b is not block]
        else:
            # Instead of a smaller one: where sizes keep changing, all blocks are soon large enough.
            small = next((i for i, b in enumerate(self._idle) if b.nbytes < nbytes), len(self._idle))
            del self._idle[small : small + 1]
            block = self._allocate(size_class(nbytes))
        self._drop_spare()
        # The finalizer holds the block, so that it outlives the lease, and nothing else does while it is out.
        lease = np.frombuffer(block.data, np.uint8, nbytes)
        weakref.finalize(lease, self._returned.put, block).atexit = False
        return lease

    @property
    def idle_bytes(self) -> int:
        """Bytes that wait to be used again."""
        self._collect()
        return sum(b.nbytes for b in self._idle)

    def _collect(self) -> None:
        """Take back what was returned, and drop the blocks idle for longest beyond the bound."""
        while True:
            try:
                self._idle.append(self._returned.get_nowait())
            except Empty:
                break
        while len(self._idle) > 2 and sum(b.nbytes for b in self._idle) > self._keep_bytes:
            self._idle.pop(0)

    def _drop_spare(self) -> None:
        self._spare = min(self._spare, len(self._idle))
        self._takes += 1
        if self._takes % SPARE_TAKES == 0:
            del self._idle[: self._spare]
            self._spare = len(self._idle)


def size_class(nbytes: int) -> int:
    """The next of eight sizes per power of two, at least 4 KiB: similar microbatches share blocks, 1/8 is wasted."""
    if nbytes <= 4096:
        return 4096
    grain = 1 << (nbytes.bit_length() - 4)
    return -(-nbytes // grain) * grain


def aligned_block(nbytes: int) -> Bytes:
    """Fresh uint8 [nbytes], aligned to ALIGNMENT."""
    if nbytes >= MAPPED_BYTES and sys.platform == "linux":
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel may be built without them
            mapped.madvise(mmap.MADV_HUGEPAGE)  # as numpy does: one page fault for 2 MiB
        return np.frombuffer(mapped, np.uint8)
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    skip = -block.ctypes.data % ALIGNMENT
    return block[skip : skip + nbytes]
