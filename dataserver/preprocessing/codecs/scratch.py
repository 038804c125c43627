"""Memory that a thread decodes into, again and again: fresh memory costs a page fault per 4 KiB."""

import threading
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_KEPT_BYTES: Final = 4 << 20
"""Of one buffer, of which a thread has three: 1.4 megapixels. What is larger is allocated and given back, so that
posters do not stay in every thread."""

_own = threading.local()


def scratch(name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """uint8 [shape] with arbitrary content; the next call of this thread with the same name may return the same."""
    size = prod(shape)
    if size > MAX_KEPT_BYTES:
        return np.empty(shape, np.uint8)
    buffers: dict[str, NDArray[np.uint8]] = _own.__dict__
    buffer = buffers.get(name)
    if buffer is None or buffer.nbytes < size:
        buffer = buffers[name] = np.empty(min(MAX_KEPT_BYTES, size + size // 2), np.uint8)
    return buffer[:size].reshape(shape)
