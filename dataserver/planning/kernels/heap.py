"""A heap of numbers under the order of their keys, in an int64 array; least (key, number) on top."""

from dataserver.planning.kernels import kernel
from dataserver.planning.samples import I64


@kernel
def sift_down(heap: I64, size: int, key: I64) -> None:
    """Restore a heap of the first `size` entries in which the root alone may be out of place."""
    if size == 0:
        return
    entry, parent = heap[0], 0
    while True:
        child = 2 * parent + 1
        if child >= size:
            break
        if child + 1 < size and (key[heap[child + 1]], heap[child + 1]) < (key[heap[child]], heap[child]):
            child += 1
        if (key[heap[child]], heap[child]) > (key[entry], entry):
            break
        heap[parent] = heap[child]
        parent = child
    heap[parent] = entry


@kernel
def sift_up(heap: I64, size: int, key: I64) -> None:
    """Restore a heap of the first `size` entries of which the last alone may be out of place."""
    child = size - 1
    entry = heap[child]
    while child > 0:
        parent = (child - 1) // 2
        if (key[heap[parent]], heap[parent]) < (key[entry], entry):
            break
        heap[child] = heap[parent]
        child = parent
    heap[child] = entry
