"""Process groups whose ranks are threads of one process, over gloo."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist

Found = TypeVar("Found")


def in_threads(size: int, run: Callable[[dist.ProcessGroup, int], Found]) -> list[Found]:
    """What each rank finds, given the group of all and its number."""
    store = dist.HashStore()

    def rank(number: int) -> Found:
        return run(_group(store, number, size), number)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


def _group(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """Only the whole of a group, not its backend, has all-to-alls."""
    found, kind = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType.GLOO
    found._set_default_backend(kind)
    found._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size))
    return found
