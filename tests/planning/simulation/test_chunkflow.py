"""ChunkFlow's toy (arXiv 2503.02356): sequences of 1, 1, 2 and 4 units on 4 stages, chunked to equal size.

The paper's text settles the chunks (with a chunk of 2 units: 1 + 1, 2, and the 4 as two halves), that times are in
proportion to lengths, and that the halves go forward in order and backward in reverse. Where the chunks stand in the
list is in a figure alone. In its figure of the chunks those of short sequences come first, and 1F1B in this order
idles for the 47.8 % that are printed; with the long sequence first it would be 55.6 %. Stages keep the activations
of both halves (K = 2). K = 1, printed as 54.1 %, runs the forward of the first half twice; when, only the figure says.
"""

import numpy as np
import pytest
from builders.operations import operations_of

from dataserver.planning.simulation import (
    Operation,
    OperationKind,
    Pipeline,
    Timeline,
    chain_edges,
    simulate,
)

KINDS = {"f": OperationKind.FORWARD, "b": OperationKind.BACKWARD}
LONG_LAST = """
    f0 f1 f2 f3 b0 b1 b3 b2
    f0 f1 f2 b0 f3 b1 b3 b2
    f0 f1 b0 f2 b1 f3 b3 b2
    f0 b0 f1 b1 f2 f3 b3 b2
"""
"""2 and 3 are the halves. 1F1B, but that the last stage needs the second half before the backward of the first."""
LONG_FIRST = """
    f0 f1 f2 f3 b1 b0 b2 b3
    f0 f1 f2 b1 f3 b0 b2 b3
    f0 f1 b1 f2 b0 f3 b2 b3
    f0 f1 b1 f2 b0 f3 b2 b3
"""
"""0 and 1 are the halves."""


def run(lists: str, units: int) -> Timeline:
    """Chunks of so many units: forward one each, backward two."""
    lines = lists.strip().splitlines()
    operations = [operations_of(Operation(KINDS[w[0]], int(w[1:])) for w in line.split()) for line in lines]
    stages, chunks = len(operations), len(operations[0]) // 2
    times = np.full((stages, chunks), units)
    edges = chain_edges(stages, chunks)
    return simulate(Pipeline(stages, np.arange(stages), times, 2 * times, edges, operations=operations))


@pytest.mark.parametrize(("lists", "makespan", "idle_ppm"), [(LONG_LAST, 46, 478_260), (LONG_FIRST, 54, 555_555)])
def test_four_chunks_of_two_units(lists: str, makespan: int, idle_ppm: int) -> None:
    found = run(lists, 2)
    assert found.busy_ns.tolist() == [3 * (1 + 1 + 2 + 4)] * 4
    assert found.makespan_ns == makespan  # unchunked 56, see test_pipeline_schedules.py
    assert found.bubble_ppm == idle_ppm


def test_two_chunks_of_four_units() -> None:
    """Too few chunks: 60 %, worse than without."""
    found = run("f0 f1 b0 b1\n" * 3 + "f0 b0 f1 b1", 4)
    assert found.makespan_ns == 60
    assert found.bubble_ppm == 600_000
