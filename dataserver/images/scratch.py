"""Memory that a thread decodes into, again and again: fresh memory costs a page fault per 4 KiB."""

import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_CACHED_BYTES: Final = 4 << 20
"""Largest buffer that a thread keeps; it has two. This holds 1.4 decoded megapixels. Larger buffers are freed after
use, so that posters do not stay in every thread."""
LINE: Final = 64
_NONE: Final = np.empty(0, np.uint8)

_own = threading.local()


def scratch(name: str, num_bytes: int = 0) -> NDArray[np.uint8]:
    """uint8 [num_bytes or more] with arbitrary content; the next call of this thread with the same name may return the
    same."""
    buffers: dict[str, NDArray[np.uint8]] = _own.__dict__
    buffer = buffers.get(name, _NONE)
    if len(buffer) >= num_bytes:
        return buffer
    if num_bytes > MAX_CACHED_BYTES:
        return _fresh(num_bytes)
    buffers[name] = _fresh(min(MAX_CACHED_BYTES, num_bytes + num_bytes // 2))
    return buffers[name]


def _fresh(num_bytes: int) -> NDArray[np.uint8]:
    """That begins at a line of the processor's caches."""
    found = np.empty(num_bytes + LINE, np.uint8)
    skip = -found.ctypes.data % LINE
    return found[skip : skip + num_bytes]
