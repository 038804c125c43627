"""What the prototypes of data servers share: batches that threads decode ahead."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from loaders.common import DECODERS, U8, Files, Place, members, read
from loaders.reporting import BATCH

AHEAD: Final = 4
"""Batches that are decoded or wait, as many as others prefetch."""
MALLOPT: Final = {-1: 256 << 20, -3: 32 << 20}
"""Thresholds (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD): memory of messages is used again instead of being given back."""

Batch = TypeVar("Batch")


def batches_ahead(folder: Path, decoder: str, made: Callable[[NDArray[np.int64], list[U8]], Batch]) -> Iterator[Batch]:
    """Batches for ever.

    Args:
        folder: of shards.
        decoder: one of `DECODERS`.
        made: makes a batch, in a decoding thread, of how many patches each image has, int64 [BATCH], and of the images.
    """
    places, decode, files = members(folder), DECODERS[decoder], Files()
    starts = cycle(range(0, len(places) - BATCH + 1, BATCH))

    def batch(of: list[Place]) -> Batch:
        images = [decode(read(files, place)) for place in of]
        return made(np.array([len(image) for image in images]), images)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        coming: deque[Future[Batch]] = deque()
        for start in starts:
            coming.append(pool.submit(batch, places[start : start + BATCH]))
            if len(coming) >= AHEAD:
                yield coming.popleft().result()
