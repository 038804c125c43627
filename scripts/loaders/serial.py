"""A serial loop in one process: `serial.py SHARDS COUNT DECODER`."""

import sys
from collections.abc import Iterator
from pathlib import Path

from loaders.common import DECODERS, Files, joined, members, read
from loaders.reporting import BATCH, report


def batches(folder: Path, decoder: str) -> Iterator[int]:
    """Images of each batch, for ever."""
    places, decode = members(folder), DECODERS[decoder]
    files: Files = {}
    while True:
        for i in range(0, len(places) - BATCH + 1, BATCH):
            yield len(joined([decode(read(files, place)) for place in places[i : i + BATCH]])[1])


if __name__ == "__main__":
    report(batches(Path(sys.argv[1]), sys.argv[3]), int(sys.argv[2]))
