"""How a loader tells the benchmark where it is. Decodes nothing, so that a consumer need not hold what does.

Imports nothing of ours.
"""

import sys
from collections.abc import Iterable, Iterator

BATCH = 32
"""Images that a batch holds."""
PREPARE = "prepare"
"""Given instead of a decoder: only make the copy of the shards that a loader wants."""


def report(batches: Iterable[int], count: int) -> None:
    """Run through batches, given the images in each, and tell the benchmark: `first`, `begin`, `end`.

    It answers each with a line, having looked at the processes in between.
    """
    iterator: Iterator[int] = iter(batches)
    next(iterator)
    _say("first")
    seen = 0
    while seen < count * 3 // 4:  # until all queues are full: what is decoded for these is no part of what is counted
        seen += next(iterator)
    _say("begin")
    seen = 0
    while seen < count:
        seen += next(iterator)
    _say(f"end {seen}")


def report_epoch(batches: Iterable[int]) -> None:
    """Run through the batches of one epoch, given the images in each, and tell the benchmark: `first`, `end`."""
    seen = 0
    for images in batches:
        if not seen:
            _say("first")
        seen += images
    _say(f"end {seen}")


def _say(line: str) -> None:
    print(line, flush=True)
    sys.stdin.readline()
