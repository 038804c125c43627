"""Ways to shuffle a dataset of equal shards: ours, and others written from their descriptions, not their code.

Each gives the samples of some epochs, int64 [epochs x n, 2]: shard and row of each, in the order of training.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import SPECIAL_TOKENS, End, Stream
from dataserver.planning.stream.gathering import gather_window
from dataserver.planning.stream.order import StreamOrder
from dataserver.planning.stream.samples import ROW_BITS, ShardTable

EPOCHS: Final = 2
BUFFER: Final = 1000
"""Samples of webdataset's shuffle buffer, as in its examples."""


@dataclass(frozen=True)
class Shape:
    """A dataset and how it is read."""

    shards: int
    samples: int
    """Samples that each shard has."""
    window: int
    """Shards that are mixed with each other."""
    batch: int
    """Samples that a step takes."""
    seed: int


def order_of(shape: Shape, version: int, kept: I64 | None = None) -> StreamOrder:
    """The order of a stream without packing; `kept` has the samples of each shard that a filter leaves."""
    tokens = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    stream = Stream.model_validate(
        {
            "datasets": [{"name": "bench", "fingerprint": "0" * 64}],
            "tokenizer": {"digest": "0" * 64, "vocab_size": 6, **tokens},
            "seq_len": 512, "global_batch": shape.batch, "packing": {"enabled": False},
            "shuffle_window": shape.window, "seed": shape.seed, "order_version": version,
        }
    )  # fmt: skip
    totals = np.full(shape.shards, shape.samples) if kept is None else kept
    return StreamOrder(stream, End(epochs=EPOCHS), [totals])


def table_of(row: I64) -> ShardTable:
    """The table of a shard, some rows of it, int64 [k]; texts of one token."""
    n, none = len(row), np.zeros(0, np.int32)
    return ShardTable(np.ones(n, np.int64), np.zeros(n + 1, np.int64), none, none, row, np.full(n, 3))


def ours(version: int) -> Callable[[Shape], I64]:
    """Return our own shuffle, by the version of the order."""

    def shuffled(shape: Shape) -> I64:
        order, table = order_of(shape, version), table_of(np.arange(shape.samples))
        steps = []
        for step in range(order.num_steps):
            for span in order.spans(step):
                steps.append(gather_window(order, span, [table] * len(span.shards)).part(span)[0])
        number = np.concatenate(steps).astype(np.int64)
        return np.stack([number >> ROW_BITS, number & ((1 << ROW_BITS) - 1)], axis=1)

    return shuffled


def in_the_manner_of_py1e(shape: Shape) -> I64:
    """MosaicML's `py1e`: each sample moves by up to half a block from where its shard lies in a permutation."""
    rng = np.random.default_rng(shape.seed)
    epochs = []
    for _ in range(EPOCHS):
        shard = np.repeat(rng.permutation(shape.shards), shape.samples)
        row = np.concatenate([rng.permutation(shape.samples) for _ in range(shape.shards)])
        moved = np.arange(len(row)) + rng.uniform(-0.5, 0.5, len(row)) * shape.window * shape.samples
        order = np.argsort(moved)
        epochs.append(np.stack([shard[order], row[order]], axis=1))
    return np.concatenate(epochs)


def in_the_manner_of_webdataset(shape: Shape) -> I64:
    """Shards in a permutation, read in their order by one worker; a buffer gives a sample at random for each one."""
    rng = np.random.default_rng(shape.seed)
    epochs = []
    for _ in range(EPOCHS):
        shard = np.repeat(rng.permutation(shape.shards), shape.samples)
        row = np.tile(np.arange(shape.samples), shape.shards)
        buffer, out = list(range(min(BUFFER, len(row)))), []
        following = iter(range(len(buffer), len(row)))
        for drawn in rng.random(len(row)):
            at = int(drawn * len(buffer))
            out.append(buffer[at])
            new = next(following, None)
            if new is None:
                buffer[at] = buffer[-1]
                buffer.pop()
            else:
                buffer[at] = new
        epochs.append(np.stack([shard[out], row[out]], axis=1))
    return np.concatenate(epochs)


SHUFFLES: Final[dict[str, Callable[[Shape], I64]]] = {
    "order_version 1": ours(1),
    "order_version 2": ours(2),
    "as MosaicML's py1e": in_the_manner_of_py1e,
    f"as webdataset's buffer of {BUFFER}": in_the_manner_of_webdataset,
}
