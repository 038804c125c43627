"""The order of microbatches that all ranks of a backbone run together, beside encoders and generators."""

from collections.abc import Sequence

import numpy as np

from dataserver.planning import I64
from dataserver.planning.simulation import (
    OrderScorer,
    Pipeline,
    chain_edges,
    disttrain_order,
    forwards,
    stage_operations,
)

MAX_OPERATIONS = 500_000
"""Operations that a search may simulate: a few milliseconds."""


def algorithm_2(pipeline: Pipeline) -> list[int]:
    """The microbatches of a chain of one node for each stage as DistTrain's Algorithm 2 orders them."""
    return disttrain_order(list(pipeline.forward_ns), list(pipeline.backward_ns))


def searched_order(pipeline: Pipeline) -> list[int]:
    """The microbatches in an order found by bounded search.

    It starts from the better of the order that they have and Algorithm 2's, and makes the best exchange of two
    microbatches, or move of one, as long as that helps; ties go to the first. Some forty microbatches or more have far
    more neighbours than may be simulated: there the better of the two is the result.
    """
    count = pipeline.forward_ns.shape[1]
    scorer = OrderScorer.of(pipeline)
    starts = np.array([np.arange(count), algorithm_2(pipeline)])
    scores = scorer.makespans(starts)
    best, score = starts[scores.argmin()], int(scores.min())
    looks = MAX_OPERATIONS // (2 * pipeline.forward_ns.size)
    rounds = looks // max(3 * count * (count - 1) // 2, 1)
    changes = _changes(count if rounds else 0)
    for _ in range(rounds):
        scores = scorer.makespans(best[changes])
        if int(scores.min(initial=score)) >= score:
            break
        best, score = best[changes[scores.argmin()]], int(scores.min())
    return [int(k) for k in best]


def chain(
    stages: list[tuple[I64, I64]], in_flight: I64, transfers_ns: I64 | None = None, returns: Sequence[bool] = ()
) -> Pipeline:
    """A pipeline of one node for each stage.

    Args:
        stages: forward and backward, int64 [microbatches] each.
        in_flight: int64 [stages].
        transfers_ns: int64 [stages - 1], from each stage to the next, the same for all microbatches; without it 0.
        returns: which stages run backwards; without it all of them.
    """
    forward, backward = (np.stack(times) for times in zip(*stages, strict=True))
    edges = chain_edges(len(stages), forward.shape[1])
    operations = [stage_operations(held, forward.shape[1]) for held in in_flight.tolist()]
    if returns:
        operations = [made if back else forwards(made) for made, back in zip(operations, returns, strict=True)]
    transfer = None if transfers_ns is None else np.tile(transfers_ns, forward.shape[1])
    return Pipeline(len(stages), np.arange(len(stages)), forward, backward, edges, operations, transfer_ns=transfer)


def _changes(count: int) -> I64:
    """Exchanges of two places, and moves from one place to another. int64 [changes, count]."""
    found = []
    for a in range(count):
        for b in range(count):
            if a == b:
                continue
            row = np.arange(count)
            if a < b:
                row[[a, b]] = b, a
                found.append(row)
            rest = np.delete(np.arange(count), a)
            found.append(np.insert(rest, b, a))
    return np.array(found, np.int64).reshape(len(found), count)
