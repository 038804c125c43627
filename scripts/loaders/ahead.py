"""What the prototypes of data servers share: batches that threads decode ahead, and how server and consumer start."""

import ctypes
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from loaders.common import DECODERS, U8, Files, Place, members, read
from loaders.reporting import BATCH, report

AHEAD: Final = 4
"""Batches that are decoded or wait, as many as others prefetch."""
MALLOPT: Final = {-1: 256 << 20, -3: 32 << 20}
"""Thresholds (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD): memory of messages is used again instead of being given back."""

SERVE: Final = "serve"
"""Given instead of a count: be the server."""

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


def run(module: str, serve: Callable[[Path, str], None], batches: Callable[[str], Iterator[int]]) -> None:
    """Be the server, or start it and report its batches: `SHARDS COUNT DECODER`.

    Args:
        module: name of the program.
        serve: is the server of a folder of shards, with a decoder, and prints its port.
        batches: images of each batch from the server at a port.
    """
    for option, threshold in MALLOPT.items():
        ctypes.CDLL(None).mallopt(option, threshold)
    shards, count, decoder = sys.argv[1:4]
    if count == SERVE:
        serve(Path(shards), decoder)
        return
    command = [sys.executable, "-m", module, shards, SERVE, decoder]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        report(batches(server.stdout.readline().strip()), int(count))
    finally:
        server.kill()
