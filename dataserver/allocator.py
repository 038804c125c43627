"""The C library's allocator, told to keep what servers and trainers allocate again a moment later."""

import ctypes
import sys
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_TOP_PAD: Final = -2
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
"""Options of mallopt(3), by their numbers in malloc.h."""
CACHED_BYTES: Final = 256 << 20
"""Free memory at the end of the heap that is not given back."""
LARGEST_BYTES: Final = 32 << 20
"""Blocks up to this come from the heap; the most that glibc takes."""
PADDING_BYTES: Final = 64 << 20
"""Asked for with what the heap of a thread grows by, and kept: else such a heap goes back as soon as it is empty."""
ARENAS: Final = 2
"""Heaps of all threads together. Messages are made by one thread and freed by another; the fewer heaps there are, the
more of what was freed is found again."""


def cache_freed_memory(share_bytes: int = CACHED_BYTES) -> None:
    """Have freed blocks used again instead of given back to the system, which costs a page fault per 4 KiB each time.

    Messages of 1 MiB come and go with every few images, and by default glibc gives such blocks back at once: a third of
    a client's CPU time. It is a setting of the whole process, so programs with a loop of their own call it if they
    like, at their start; `trainclient train` does. Without glibc this does nothing.

    Args:
        share_bytes: free memory that may stay at the end of the heap at most.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES)
        mallopt(M_TRIM_THRESHOLD, min(CACHED_BYTES, share_bytes))
        mallopt(M_TOP_PAD, min(PADDING_BYTES, share_bytes // 4))
        mallopt(M_ARENA_MAX, ARENAS)
