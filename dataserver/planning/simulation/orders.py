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
class OrderTimes:
    """What microbatches cost in blocks, in r rows.

    A line is a row of microbatches with an order of its own, such as those of one data-parallel rank of the backbone. A
    block that serves several lines at once, such as an encoder rank that feeds several backbone ranks, has a row for
    each of them: its pass number k takes the sum of their k-th microbatches.
    """

    block: I64
    """int64 [r]: the block of each row; every block has one at least."""
    line: I64
    """int64 [r]: the line whose microbatches the row prices."""
    forward_ns: I64
    """int64 [r, microbatches]: time of each forward."""
    backward_ns: I64
    """int64 [r, microbatches]: time of each backward."""

    @classmethod
    def of(cls, pipeline: Pipeline) -> Self:
        """The pipeline's own times: one line, whose order holds in all blocks."""
        blocks = len(pipeline.forward_ns)
        return cls(np.arange(blocks), np.zeros(blocks, np.int64), pipeline.forward_ns, pipeline.backward_ns)


@dataclass(frozen=True, slots=True)
class OrderScorer:
    """The operations of a pipeline in an order in which each comes after all that it waits for.

    Which operation waits for which does not depend on the times, nor on the order of the microbatches as long as every
    pass is joined in the same way. So the graph is sorted once, and an order costs one sweep over it.
    """

    cell: I64
    """int64 [ops]: (kind * blocks + block) * microbatches + pass of each operation, -1 for an interaction."""
    fixed_ns: I64
    """int64 [ops]: time of each interaction."""
    previous: I64
    """int64 [ops]: the operation before it on its node, -1 for none."""
    offsets: I64
    """int64 [ops + 1]: of what each waits for beside that."""
    needs: I64
    """int64 [offsets[-1]]: the operations waited for."""
    delay_ns: I64
    """int64 [offsets[-1]]: time from the end of each of these to the start of what waits."""
    shape: tuple[int, int]
    """Number of blocks, and of microbatches."""
    batch_size: int
    """Microbatches of a contrastive batch; all of them where microbatches do not interact."""

    @classmethod
    def of(cls, pipeline: Pipeline) -> Self:
        """Sort the operations of a pipeline; its times play no part, its transfers and interactions do.

        Raises:
            ValueError: the passes are not all joined alike, or what `simulate` refuses.
            PipelineDeadlockError: the lists wait for each other.
        """
        from dataserver.planning.kernels.operations import run_operations

        shape = pipeline.forward_ns.shape
        _check_joins(pipeline)
        graph = build_graph(pipeline)
        _, _, order = run_operations(
            np.zeros_like(graph.waits), graph.follows, graph.offsets, graph.after, graph.delay_ns, graph.waits.copy()
        )
        if len(order) < np.count_nonzero(graph.waits >= 0):
            raise PipelineDeadlockError("the operation lists wait for each other; see `simulate` for the nodes")
        passes, nothing = np.arange(2 * shape[0] * shape[1]).reshape(2, *shape), np.zeros(shape, np.int64)
        interaction = pipeline.interaction_ns
        none = None if interaction is None else np.full_like(interaction, -1)
        number = np.full(len(graph.waits), -1, np.int64)
        number[order] = np.arange(len(order))
        after, before = number[graph.after], number[np.repeat(np.arange(len(number)), np.diff(graph.offsets))]
        by_after = np.argsort(after, kind="stable")
        chained = np.concatenate([np.zeros(1, np.bool_), graph.follows[:-1]])
        return cls(
            cell=graph.spread(cell_values(pipeline, passes[0], passes[1], none), blank=-1)[order],
            fixed_ns=graph.spread(cell_values(pipeline, nothing, nothing, interaction))[order],
            previous=np.where(chained[order], number[order - 1], -1),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(after, minlength=len(order)))]),
            needs=before[by_after],
            delay_ns=graph.delay_ns[by_after],
            shape=(shape[0], shape[1]),
            batch_size=shape[1] // max(pipeline.num_batches, 1),
        )

    def makespans(self, times: OrderTimes, orders: I64) -> I64:
        """Makespan of each of k orders, exactly what `simulate` gives for the reordered times.

        Args:
            times: see there.
            orders: int64 [k, lines, microbatches], or [k, microbatches] for one line: each row a permutation, the
                microbatch that goes first, second, ...

        Returns:
            int64 [k], nanoseconds.

        Raises:
            ValueError: the shapes do not fit, a row is no permutation or takes a microbatch out of its contrastive
                batch, or a block has no times.
        """
        from dataserver.planning.kernels.operations import run_orders

        lines = int(times.line.max(initial=0)) + 1
        orders = np.array(orders if orders.ndim == 3 else orders[:, None], np.int64)
        self._check(times, orders, lines)
        by_block = np.argsort(times.block, kind="stable")
        rows = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(times.block, minlength=self.shape[0]))])
        durations = np.stack([times.forward_ns[by_block], times.backward_ns[by_block]])
        return run_orders(
            self.cell, self.fixed_ns, self.previous, self.offsets, self.needs, self.delay_ns,
            rows, times.line[by_block], durations, orders,
        )  # fmt: skip

    def _check(self, times: OrderTimes, orders: I64, lines: int) -> None:
        blocks, microbatches = self.shape
        wanted = len(times.block), microbatches
        if orders.shape[1:] != (lines, microbatches) or {times.forward_ns.shape, times.backward_ns.shape} != {wanted}:
            raise ValueError(
                f"orders of shape {orders.shape}, times of shapes {times.forward_ns.shape}, {times.backward_ns.shape}; "
                f"(k, {lines}, {microbatches}) and twice {wanted} are required"
            )
        if not np.array_equal(np.unique(times.block), np.arange(blocks)):
            raise ValueError(f"times name blocks {np.unique(times.block).tolist()}; each of {blocks} needs a row")
        places = np.arange(microbatches)
        if not (np.sort(orders, axis=2) == places).all():
            raise ValueError(f"an order is no permutation of {microbatches} microbatches")
        if not (orders // self.batch_size == places // self.batch_size).all():
            raise ValueError(f"an order takes a microbatch out of its contrastive batch of {self.batch_size}")


def _check_joins(pipeline: Pipeline) -> None:
    """Every pass must be joined like the first, with the same transfers."""
    pipeline.check()
    delay = np.zeros(len(pipeline.edges), np.int64) if pipeline.transfer_ns is None else pipeline.transfer_ns
    joins = np.column_stack([pipeline.edges, delay])
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
