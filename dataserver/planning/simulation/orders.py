"""Orders of the microbatches: DistTrain's Algorithm 2, and the makespans of many orders under the same programs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.simulation.graph import PipelineDeadlockError, build_graph, cell_values
from dataserver.planning.simulation.pipeline import Pipeline

_LOOKS: Final = 1 << 23
"""Looks at a candidate between two pauses, at most, but for a single rank's: some 10 ms."""


@dataclass(frozen=True, slots=True)
class OrderScorer:
    """The operations of a pipeline in an order in which each comes after all that it waits for.

    Which operation waits for which does not depend on the order of the microbatches as long as every pass is joined in
    the same way. So the graph is sorted once, and an order costs one sweep over it.
    """

    cell: I64
    """int64 [ops]: (kind * blocks + block) * microbatches + pass of each operation."""
    previous: I64
    """int64 [ops]: the operation before it on its node, -1 for none."""
    offsets: I64
    """int64 [ops + 1]: of what each waits for beside that."""
    needs: I64
    """int64 [offsets[-1]]: the operations waited for."""
    delay_ns: I64
    """int64 [offsets[-1]]: time from the end of each of these to the start of what waits."""
    times_ns: I64
    """int64 [2, blocks, microbatches]: forward and backward of each microbatch."""

    @classmethod
    def of(cls, pipeline: Pipeline) -> Self:
        """Sort the operations of a pipeline without contrastive batches.

        Raises:
            ValueError: the passes are not all joined alike, or what `simulate` refuses.
            PipelineDeadlockError: the lists wait for each other.
        """
        from dataserver.planning.kernels.operations import run_operations

        graph = build_graph(pipeline)
        _check_joins(pipeline)
        _, _, order = run_operations(
            np.zeros_like(graph.waits), graph.follows, graph.offsets, graph.after, graph.delay_ns, graph.waits.copy()
        )
        if len(order) < np.count_nonzero(graph.waits >= 0):
            raise PipelineDeadlockError("the operation lists wait for each other; see `simulate` for the nodes")
        times = np.stack([pipeline.forward_ns, pipeline.backward_ns])
        passes = np.arange(times.size).reshape(times.shape)
        number = np.full(len(graph.waits), -1, np.int64)
        number[order] = np.arange(len(order))
        after, before = number[graph.after], number[np.repeat(np.arange(len(number)), np.diff(graph.offsets))]
        by_after = np.argsort(after, kind="stable")
        chained = np.concatenate([np.zeros(1, np.bool_), graph.follows[:-1]])
        return cls(
            cell=graph.spread(cell_values(pipeline, passes[0], passes[1], None))[order],
            previous=np.where(chained[order], number[order - 1], -1),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(after, minlength=len(order)))]),
            needs=before[by_after],
            delay_ns=graph.delay_ns[by_after],
            times_ns=times,
        )

    def makespans(self, orders: I64) -> I64:
        """Makespan of each of k orders, exactly what `simulate` gives for the reordered times. int64 [k], nanoseconds.

        Args:
            orders: int64 [k, microbatches], each row a permutation: the microbatch that goes first, second, ...

        Raises:
            ValueError: a row is no permutation.
        """
        from dataserver.planning.kernels.operations import run_orders

        microbatches = self.times_ns.shape[2]
        if orders.shape[1:] != (microbatches,) or not (np.sort(orders, axis=1) == np.arange(microbatches)).all():
            raise ValueError(f"an order is no permutation of {microbatches} microbatches")
        orders = np.array(orders, np.int64)
        return run_orders(self.cell, self.previous, self.offsets, self.needs, self.delay_ns, self.times_ns, orders)


def _check_joins(pipeline: Pipeline) -> None:
    """Every pass must be joined like the first, with the same transfers."""
    joins = np.column_stack([pipeline.edges, pipeline.delay_ns])
    joins = joins[np.lexsort(joins.T[::-1])]
    count = pipeline.forward_ns.shape[1]
    if len(joins) % max(count, 1) or not (np.diff(joins[:, 1:].reshape(count, -1), axis=0) == 0).all():
        raise ValueError(
            "not all microbatches are joined alike, so their order changes who waits for whom; use `simulate` for each"
        )


def disttrain_order(forward_ns: Sequence[I64], backward_ns: Sequence[I64]) -> list[int]:
    """DistTrain's Algorithm 2 (inter-microbatch reordering, section 5.3) for 1F1B.

    The smallest microbatch goes first, so that all stages start early; the p - 1 next smallest go last, where their
    intervals cannot be filled; the others fill the intervals in which the first stage waits, each by the closest fit.
    The first interval, from the first forward to the first backward, takes p - 1 microbatches; interval i lasts as long
    as the slowest later stage works on microbatch i.

    Args:
        forward_ns: for each of the p stages int64 [l]: forward time of each microbatch.
        backward_ns: the same for backward.

    Returns:
        A permutation of range(l).
    """
    forward, backward = np.array(forward_ns, np.int64), np.array(backward_ns, np.int64)
    order: list[int] = disttrain_orders(forward[None], backward[None])[0].tolist()
    return order


def disttrain_orders(forward_ns: I64, backward_ns: I64) -> I64:
    """`disttrain_order` of many ranks.

    Args:
        forward_ns: int64 [r, p, l]: forward time of each rank's microbatches in each stage.
        backward_ns: the same for backward.

    Returns:
        int64 [r, l]: a permutation of range(l) for each rank.
    """
    from dataserver.planning.kernels import ordering

    ascending = np.argsort(forward_ns.sum(axis=1), axis=1, kind="stable")
    forward, backward = np.ascontiguousarray(forward_ns), np.ascontiguousarray(backward_ns)
    orders = np.empty_like(ascending)
    ranks = max(1, _LOOKS // max(1, ascending.shape[1]) ** 2)
    for piece in (slice(first, first + ranks) for first in range(0, len(ascending), ranks)):
        yield_point()
        orders[piece] = ordering.disttrain_orders(forward[piece], backward[piece], ascending[piece])
    return orders
