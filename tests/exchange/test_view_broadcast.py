"""One fetch for a group of ranks: what the reader hands on, over gloo between threads."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from builders.gloo_threads import in_threads
from disttrain.v1 import microbatch_pb2 as mb

from trainclient.client import Batch, as_torch
from trainclient.exchange.view_broadcast import Batches, SharedBatches
from trainclient.exchange.view_groups import SharedSequences
from trainclient.stream.microbatch import read_header, read_table

RANKS = (0, 1)
VALUES = [3, 1, 4]


def view(microbatch: int, *, withheld: bool, wait_s: float) -> Batch:
    """Of three integers, which rank 1 reads."""
    header = mb.MicrobatchHeader(plan_hash=b"h" * 32, microbatch=microbatch, num_microbatches=2, withheld=withheld)
    header.tensors.append(mb.Tensor(name="x", dtype=mb.DATA_TYPE_INT32, shape=[3], raw_bytes=12, encoded_bytes=12))
    header.tensors[0].codec, header.total_bytes = mb.CODEC_RAW, 12
    header.sequence_parallel_groups.append(mb.SequenceParallelGroup(id=0, degree=2, ranks=RANKS, reader=1))
    found = read_header(header, read_table(header, 1000))
    return replace(as_torch(found.with_tensors({} if withheld else {"x": np.array(VALUES, np.int32)})), wait_s=wait_s)


class Read:
    """Microbatches that have come."""

    ready = True

    def __init__(self, *batches: Batch) -> None:
        self._batches = iter(batches)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)


def test_a_rank_waits_for_data_only_as_long_as_its_reader_did() -> None:
    """All else that it waits is for another rank."""
    nothing: Any = object()

    def run(group: dist.ProcessGroup, rank: int) -> list[tuple[list[int], float | None]]:
        shared = SharedSequences(rank, {RANKS: nothing})
        views = [view(i, withheld=rank == 0, wait_s=wait_s) for i, wait_s in enumerate((0.0, 1e9))]
        batches = SharedBatches(cast(Batches, Read(*views)), shared, {RANKS: group}, pin=False)
        found = []
        for batch in batches:
            waited = None if batch.arriving is None else batch.arriving.wait()
            found.append((batch.tensors["x"].tolist(), waited))
        torch.distributed.barrier(group)  # gloo has handed everything on
        return found

    (first, second), read = in_threads(len(RANKS), run)
    assert read == [(VALUES, None)] * 2
    assert first == (VALUES, 0.0)
    assert second[0] == VALUES
    assert second[1] is not None
    assert 0 < second[1] < 600
