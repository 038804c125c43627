"""The paper's mixed-integer programme for one microbatch, solved by HiGHS (FlexSP, section 3.3 and 3.4).

A reference: seconds, not milliseconds. The only place of the planner where floats take part, so its plans are the same
only for the same version of HiGHS. Bounded by branch-and-bound nodes on one thread, never by time.
"""

from itertools import pairwise
from typing import Any, cast

import numpy as np

from dataserver.planning import I64
from dataserver.planning.layouts.grouped.batch import Batch, Grouping
from dataserver.planning.layouts.grouped.search import chunk_bounds
from planning_rows.flexsp_buckets import bucket_ends

NUM_BUCKETS = 16
"""The number Q in section 3.4 of the paper."""

MAX_NODES = 200
"""Branch-and-bound nodes of one microbatch."""


def solve(batch: Batch, counts: int, num_buckets: int = NUM_BUCKETS, max_nodes: int = MAX_NODES) -> list[Grouping]:
    """Chunks of equal tokens (eq. 24), each solved by itself; the best of `counts` numbers of microbatches.

    Args:
        batch: the sequences.
        counts: numbers of microbatches tried, from the fewest that memory allows.
        num_buckets: buckets of a chunk at least; more where rounding up would leave too little memory.
        max_nodes: branch-and-bound nodes of one chunk.

    Raises:
        ValueError: no plan found within the nodes.
        ModuleNotFoundError: highspy is not installed.
    """
    best: list[Grouping] | None = None
    best_ns, first = 0, max(batch.fewest, min(1, len(batch.lengths)))
    for count in range(first, min(first + counts, len(batch.lengths) + 1)):
        bounds = chunk_bounds(batch.lengths, count)
        found = [solve_chunk(batch, a, b, num_buckets, max_nodes) for a, b in pairwise(bounds.tolist())]
        whole = [g for g in found if g is not None]
        total = count * batch.costs.fixed_ns + sum(g.time_ns for g in whole)
        if len(whole) == count and (best is None or total < best_ns):
            best, best_ns = whole, total
    if best is None and len(batch.lengths):
        raise ValueError(
            f"HiGHS found no plan of {first} to {first + counts - 1} microbatches within {max_nodes} nodes each; raise "
            "microbatch_counts, or use solver 'search'"
        )
    return best or []


def solve_chunk(batch: Batch, start: int, end: int, num_buckets: int, max_nodes: int) -> Grouping | None:
    """Sequences [start, end) as one microbatch, or None where HiGHS finds no solution.

    Lengths are rounded up to `num_buckets` buckets, or are themselves where a bucket holds equal ones only.
    """
    members = np.arange(start, end)
    lengths = batch.lengths[members]
    if not len(members) or int(lengths.sum()) > batch.costs.cluster_tokens:
        return None
    sizes, bucket = _buckets(lengths, num_buckets, batch.costs.cluster_tokens)
    times = np.zeros((len(sizes), len(batch.costs.degrees)), np.int64)
    np.maximum.at(times, bucket, batch.times[members])
    programme = _Programme(batch, sizes, times, np.bincount(bucket))
    amounts = programme.solve(max_nodes)
    if amounts is None:
        return None
    used = amounts.sum(axis=0) > 0
    composition = np.bincount(programme.columns[used], minlength=len(batch.costs.degrees))
    _complete(composition, batch.cells)
    first = np.cumsum(composition) - composition
    group = np.empty(len(members), np.int64)
    seats = np.zeros(len(composition), np.int64)
    waiting = [np.flatnonzero(bucket == q).tolist() for q in range(len(sizes))]
    for p in np.flatnonzero(used):
        number = first[programme.columns[p]] + seats[programme.columns[p]]
        seats[programme.columns[p]] += 1
        for q, amount in enumerate(amounts[:, p].tolist()):
            group[waiting[q][:amount]] = number
            del waiting[q][:amount]
    column = np.repeat(np.arange(len(composition)), composition)[group]
    loads = np.zeros(int(composition.sum()), np.int64)
    np.add.at(loads, group, batch.times[members, column])
    return Grouping(members, composition, group, int(loads.max()))


def _buckets(lengths: I64, num_buckets: int, budget: int) -> tuple[I64, I64]:
    """Size of each bucket, and the bucket of each of the `lengths` (descending).

    As in the public code, buckets are added until rounding up takes at most half of the memory that is left.
    """
    ascending = lengths[::-1]
    distinct, inverse = np.unique(ascending, return_inverse=True)
    allowed = (int(lengths.sum()) + budget) // 2
    while num_buckets < len(distinct):
        ends = bucket_ends(ascending, num_buckets)
        sizes = ascending[ends - 1]
        counts = np.diff(ends, prepend=0)
        if int((sizes * counts).sum()) <= allowed:
            return sizes, np.repeat(np.arange(len(sizes)), counts)[::-1]
        num_buckets *= 2
    return distinct, inverse.astype(np.int64)[::-1]


def _complete(composition: I64, cells: int) -> None:
    """Idle devices become groups of their own, so that the groups make up the cluster."""
    left = cells - int((composition << np.arange(len(composition))).sum())
    for column in range(len(composition) - 1, -1, -1):
        composition[column] += left >> column
        left -= (left >> column) << column


class _Programme:
    """min C over A[q, p] integer >= 0, m[p] in {0, 1}: eq. 17-21, with sizes and times of buckets for sequences'.

    Variables: A bucket by bucket, then m, then C in milliseconds. Virtual groups of one degree are alike; m falls
    within a degree, which leaves out permutations.
    """

    def __init__(self, batch: Batch, sizes: I64, times_ns: I64, counts: I64) -> None:
        degrees = batch.costs.degrees
        self.columns = np.repeat(np.arange(len(degrees)), [batch.cells >> j for j in range(len(degrees))])
        self._batch, self._sizes, self._counts = batch, sizes, counts
        self._floors = batch.costs.floors(sizes)
        self._rows: list[tuple[list[int], list[float], float, float]] = []
        self._constrain(times_ns)

    def _constrain(self, times_ns: I64) -> None:
        batch, num_groups, num_sizes = self._batch, len(self.columns), len(self._sizes)
        used, end, infinity = num_sizes * num_groups, (num_sizes + 1) * num_groups, float("inf")
        times = times_ns / 1e6
        for q in range(num_sizes):
            row = list(range(q * num_groups, (q + 1) * num_groups))
            self._rows.append((row, [1.0] * num_groups, float(self._counts[q]), float(self._counts[q])))
        for p, j in enumerate(self.columns.tolist()):
            row = list(range(p, used, num_groups))
            tokens = float(batch.cell_tokens << j)
            self._rows.append(([*row, end], [*times[:, j].tolist(), -1.0], -infinity, 0.0))
            self._rows.append(([*row, used + p], [*self._sizes.astype(float).tolist(), -tokens], -infinity, 0.0))
            if p and self.columns[p - 1] == j:
                self._rows.append(([used + p - 1, used + p], [1.0, -1.0], 0.0, infinity))
        weights = [float(1 << j) for j in self.columns.tolist()]
        self._rows.append((list(range(used, end)), weights, -infinity, float(batch.cells)))

    def solve(self, max_nodes: int) -> I64 | None:
        """int64 [buckets, groups]: how many sequences of each bucket each virtual group takes."""
        import highspy

        highs = cast(Any, highspy).Highs()
        for option, value in (("output_flag", False), ("threads", 1), ("random_seed", 0), ("mip_max_nodes", max_nodes)):
            highs.setOptionValue(option, value)
        highs.passModel(self._model(highspy))
        highs.run()
        if highs.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        values = np.array(highs.getSolution().col_value[: len(self._sizes) * len(self.columns)])
        amounts: I64 = np.rint(values).astype(np.int64).reshape(len(self._sizes), len(self.columns))
        return amounts

    def _model(self, highspy: Any) -> Any:
        num_groups, num_sizes = len(self.columns), len(self._sizes)
        allowed = self.columns[None, :] >= self._floors[:, None]
        upper = np.where(allowed, self._counts[:, None], 0).ravel().astype(float)
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = (num_sizes + 1) * num_groups + 1, len(self._rows)
        model.col_cost_ = np.array([0.0] * (model.num_col_ - 1) + [1.0])
        model.col_lower_ = np.zeros(model.num_col_)
        model.col_upper_ = np.concatenate([upper, np.ones(num_groups), [highspy.kHighsInf]])
        model.row_lower_ = np.array([row[2] for row in self._rows])
        model.row_upper_ = np.array([row[3] for row in self._rows])
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0] + [len(row[0]) for row in self._rows])
        model.a_matrix_.index_ = np.concatenate([row[0] for row in self._rows])
        model.a_matrix_.value_ = np.concatenate([row[1] for row in self._rows])
        model.integrality_ = [highspy.HighsVarType.kInteger] * (model.num_col_ - 1) + [highspy.HighsVarType.kContinuous]
        return model
