"""A heap of numbers under the order of their keys, in an int64 array; least (key, number) on top."""

from dataserver.planning import I64
from dataserver.planning.kernels.compiler import part


@part
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


@part
def sift_up(heap: I64, size: int, key: I64) -> None:
    """Restore a heap of the first `size` entries; the last alone may be out of place."""
    child = size - 1
    entry = heap[child]
    while child > 0:
        parent = (child - 1) // 2
        if (key[heap[parent]], heap[parent]) < (key[entry], entry):
            break
        heap[child] = heap[parent]
        child = parent
    heap[child] = entry


@part
def sort_by(key: I64, order: I64) -> None:
    """Fill `order` with the numbers from 0 on by ascending key, the lower on ties."""
    for number in range(len(order)):
        order[number] = number
        sift_up(order, number + 1, key)
    for size in range(len(order) - 1, 0, -1):  # the least moves behind the others
        order[0], order[size] = order[size], order[0]
        sift_down(order, size, key)
    for front in range(len(order) // 2):
        back = len(order) - 1 - front
        order[front], order[back] = order[back], order[front]
