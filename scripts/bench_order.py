#!/usr/bin/env python
"""How well an order shuffles, and how evenly it needs bytes of a store, over two epochs.

- *spread*: standard deviation of the positions of a shard's samples in an epoch, in lengths of a shard;
- *neighbours*: how often samples that follow each other in a shard are in one step, as a multiple of chance;
- *need*: blocks of 8 MiB that are read in a step, by a cache of 1.25 windows that gives up what was used least
  recently: the most in any step after the first window, over the mean of all;
- *read*: bytes read from the store over bytes needed.

Nothing is read ahead here; `bench_storage.py` reads ahead. The exit code is 1 if order version 2 misses its target.
"""

import argparse
import sys
from collections import OrderedDict

import numpy as np
from benchmarks.rows import Row, report
from benchmarks.shuffles import EPOCHS, SHUFFLES, Shape

from dataserver.planning import I64

BLOCK_SAMPLES = 109
"""Samples of 77 KB in a block of 8 MiB."""
WINDOWS = 1.25
READ = 1.1


def spread(order: I64, shape: Shape) -> float:
    """How far the samples of a shard spread over the positions, in lengths of a shard; the mean of all shards and
    epochs."""
    epochs = order[:, 0].reshape(EPOCHS, -1)
    return float(np.mean([np.flatnonzero(e == s).std() for e in epochs for s in range(shape.shards)])) / shape.samples


def neighbours(order: I64, shape: Shape) -> float:
    """How often neighbours in a shard meet in a step, as a multiple of chance."""
    total = shape.shards * shape.samples
    step = np.arange(total) // shape.batch
    found = []
    for epoch in order.reshape(EPOCHS, total, 2):
        of = np.empty((shape.shards, shape.samples), np.int64)
        of[epoch[:, 0], epoch[:, 1]] = step
        found.append((of[:, 1:] == of[:, :-1]).mean())
    return float(np.mean(found)) / (shape.batch / total)


def read(order: I64, shape: Shape) -> tuple[float, float]:
    """The peak of blocks read in a step over their mean, and all blocks read over those needed."""
    per_shard = -(-shape.samples // BLOCK_SAMPLES)
    blocks = order[:, 0] * per_shard + order[:, 1] // BLOCK_SAMPLES
    room, held = int(WINDOWS * shape.window * per_shard), OrderedDict[int, None]()
    counts = np.zeros(-(-len(blocks) // shape.batch), np.int64)
    for at, block in enumerate(blocks.tolist()):
        if block in held:
            held.move_to_end(block)
            continue
        counts[at // shape.batch] += 1
        held[block] = None
        if len(held) > room:
            held.popitem(last=False)
    begun = shape.window * shape.samples // shape.batch + 1
    return float(counts[begun:].max() / counts.mean()), float(counts.sum() / (EPOCHS * shape.shards * per_shard))


def rows_of(shape: Shape) -> list[Row]:
    """All orders over one dataset."""
    what = f"{shape.shards} shards of {shape.samples} samples, window {shape.window}, steps of {shape.batch}"
    rows = []
    for name, shuffle in SHUFFLES.items():
        order = shuffle(shape)
        peak, ratio = read(order, shape)
        rows += [
            Row(f"spread, {name}, {what}", f"{spread(order, shape):.2f}", "", None),
            Row(f"neighbours, {name}", f"{neighbours(order, shape):.1f}", "", None),
            Row(f"need, {name}", f"{peak:.1f}", "", None),
        ]
        if name == "order_version 2":
            rows.append(Row(f"read, {name}", f"{ratio:.2f}", f"<= {READ}", ratio <= READ))
        else:
            rows.append(Row(f"read, {name}", f"{ratio:.2f}", "", None))
    return rows


def main() -> int:
    """Measure all orders, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=64, help="default 64")
    parser.add_argument("--samples", type=int, default=10_000, help="of each shard (default 10000)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    shards, samples, seed = arguments.shards, arguments.samples, arguments.seed
    shapes = Shape(shards, samples, 8, 512, seed), Shape(shards * 3 // 4, samples * 6 // 10, 6, 384, seed + 1)
    return report([row for shape in shapes for row in rows_of(shape)])


if __name__ == "__main__":
    sys.exit(main())
