"""A time that no placement can beat."""

import numpy as np

from dataserver.planning import I64
from dataserver.planning.layouts.pipelined.placing.problem import PlacementProblem


def lower_bound_ns(problem: PlacementProblem) -> int:
    """A time that no placement of the problem's sequences can beat, under any operation lists."""
    return max(work_bound_ns(problem), _longest_way(problem))


def work_bound_ns(problem: PlacementProblem) -> int:
    """The same from the work of ranks alone, whatever way a single sequence has.

    Some rank of each stage has at least the mean work of the stage. Before it begins with its first microbatch that
    holds a sequence, that sequence passes all earlier stages and the transfers between them, and after the last one its
    gradients pass them again. Meanwhile the rank can do no more than the constant part of its microbatches without
    sequences. Where no slot is empty, backbone ranks wait longer for their first wave and behind
    their last, see `_ends`.
    """
    both, base = _both(problem, problem.work), _both(problem, problem.base[:, None])[:, 0]
    there, back = _ways(problem)
    bound = 0
    for row in range(len(base)):
        ranks = problem.components * (problem.ranks_per_component if row == problem.num_encoders else 1)
        work = int(both[row].sum()) // ranks + int(base[row]) * problem.num_waves
        bound = max(bound, work)
        mine = np.flatnonzero(problem.own[row, :-1])
        if not len(mine):
            continue
        away = int(there[row, mine].min() + back[row, mine].min())
        bound = max(bound, work + away - _empty(problem, row, len(mine)) * int(base[row]))
        if row == problem.num_encoders:
            bound = max(bound, work + _ends(problem))
    if problem.whole:  # the first stage does the work of both
        until = problem.num_encoders + 1
        bound = max(bound, int(both[:until].sum()) // problem.dp + int(base[:until].sum()) * problem.num_waves)
    return bound


def _longest_way(problem: PlacementProblem) -> int:
    """What the sequence with the longest way takes through all modules and back, and its rank for other microbatches.

    Waves pass each rank in the same order forward and back. So a backbone rank of the first stage has run the forwards
    of earlier waves before the sequence passes, and runs the backwards of later ones behind its gradients; meanwhile
    encoders may work on the sequence. Each generator returns gradients when it has them, whatever others do.
    """
    if not problem.num_sequences:
        return 0
    backbone, parts = problem.num_encoders, problem.num_stages * problem.chunks
    encoding, inside = np.zeros((2, problem.num_sequences), np.int64)
    generating = np.zeros_like(problem.way[backbone + 1 :])
    for passing, transfer in _passings(problem):
        encoding += (passing[:backbone] + transfer[:backbone]).max(axis=0, initial=0)
        inside += passing[backbone] * parts + transfer[backbone] * (parts - 1)
        generating += passing[backbone + 1 :] + transfer[backbone + 1 :]
    inside += generating.max(axis=0, initial=0)
    return int((inside + np.maximum(encoding, _beside(problem))).max())


def _beside(problem: PlacementProblem) -> int:
    """Forwards or backwards, whatever is shorter, that a rank runs in its first chunk for its other microbatches."""
    backbone, others = problem.num_encoders, problem.num_waves - 1
    elsewhere = ((problem.dp - 1) * problem.num_waves + 1) * problem.slots
    least = np.sort(problem.work[backbone])[: max(0, problem.num_sequences - elsewhere)]
    forward = (int(least.sum()) + others * int(problem.base[backbone])) // problem.chunks
    percent = min(100, int(problem.percent[backbone]))
    return max(0, forward * percent // 100 - others)  # each backward may have lost a nanosecond


def _ends(problem: PlacementProblem) -> int:
    """What backbone ranks of the last stage wait on average for their first wave, and others behind their last.

    An encoder rank hands over all that it has of a wave at once. Let x(r, e) be the work that encoder rank e has for
    backbone rank r in the first wave, L(e) its sum over r, t the least that any r needs, F(r) the largest L(e) with
    x(r, e) > 0. Cut all x(r, e) down until every r needs just t; then t x sum of F(r) >= sum of x(r, e) L(e) = sum of
    L(e)^2, so that the mean of F is at least t x backbone ranks / encoder ranks, however images are spread. The same
    holds for the last wave on the way back. Makespans are no less than the mean of what ranks wait and work.

    Waves pass forward and back in the same order, so that the first and the last one have no sequence in common.

    0 unless every slot is in use: a rank could otherwise begin with another wave.
    """
    backbone, ranks, chunks = problem.num_encoders, problem.ranks_per_component, problem.chunks
    if not problem.num_sequences or problem.num_sequences < problem.dp * problem.num_waves * problem.slots:
        return 0
    least, percents = _least(problem)
    transfer, transfer_back = _smallest_transfers(problem)
    there, back, encoders = 0, 0, 0
    for row, percent, base in zip(range(backbone), problem.percent.tolist(), problem.base.tolist(), strict=False):
        if not (wave := ranks * int(least[row])):
            continue
        wait, wait_back = wave + base + int(transfer[row]), (wave + base) * percent // 100 - 1 + int(transfer_back[row])
        there, back = max(there, wait), max(back, wait_back if percent else 0)
        if percent:
            ends = (ranks * int(percents[row]) + (100 + percent) * base) // 100 - 1
            encoders = max(encoders, ends + int(transfer[row]) + int(transfer_back[row]))
    percent, base = int(problem.percent[backbone]), int(problem.base[backbone]) - (chunks - 1)
    between = (int(percents[backbone]) + (100 + percent) * base) // (100 * chunks)
    between += int(transfer[backbone]) + int(transfer_back[backbone])
    return max(there + back, encoders) + (problem.num_stages - 1) * max(0, between)


def _least(problem: PlacementProblem) -> tuple[I64, I64]:
    """The least work of each row in a full wave of one rank; and 100 times that of a first wave with the percent of
    that of a last one. int64 [rows] each."""
    work = np.sort(problem.work, axis=1)[:, : 2 * problem.slots]
    least = work[:, : problem.slots].sum(axis=1)
    both = work.sum(axis=1) if problem.num_waves > 1 else 2 * least
    less, more = np.minimum(100, problem.percent), np.maximum(100, problem.percent)
    return least, less * both + (more - less) * least


def _smallest_transfers(problem: PlacementProblem) -> tuple[I64, I64]:
    """The least transfers of any rows that cross, and those that gradients take back. int64 [rows] each.

    The encoder rank that a backbone rank waits for longest may hand it the smallest of its images alone.
    """
    if problem.transfers is None:
        return np.zeros_like(problem.base), np.zeros_like(problem.base)
    return problem.transfers.smallest, problem.transfers.smallest * problem.transfers.returned


def _transfers(problem: PlacementProblem) -> tuple[I64, I64]:
    """The least transfers of each row, and those that gradients take back. int64 [rows, s] each."""
    transfers = problem.transfers
    if transfers is None:
        return np.zeros_like(problem.way), np.zeros_like(problem.way)
    return transfers.least, transfers.least * transfers.returned[:, None]


def _both(problem: PlacementProblem, forward: I64) -> I64:
    """Forward and backward time, int64 [rows, any]."""
    found: I64 = forward + forward * problem.percent[:, None] // 100
    part = forward[problem.num_encoders] // problem.chunks
    found[problem.num_encoders] = problem.chunks * (part + part * problem.percent[problem.num_encoders] // 100)
    return found


def _passings(problem: PlacementProblem) -> list[tuple[I64, I64]]:
    """What each sequence takes in each row alone, of the backbone in one chunk, and its least transfers.

    int64 [rows, s] each; of its forward and of its backward.
    """
    forward = np.where(problem.way > 0, problem.way + problem.base[:, None], 0)
    forward[problem.num_encoders] //= problem.chunks
    backward = forward * problem.percent[:, None] // 100
    return list(zip((forward, backward), _transfers(problem), strict=True))


def _ways(problem: PlacementProblem) -> tuple[I64, I64]:
    """Time of each sequence from the beginning to the row, and of its gradients from there to the end.

    int64 [rows, s] each; of the backbone to its last stage. Transfers are part of them.
    """
    backbone, parts, found = problem.num_encoders, problem.num_stages * problem.chunks, []
    for passing, transfer in _passings(problem):
        way = np.zeros_like(passing)
        encoders = (passing[:backbone] + transfer[:backbone]).max(axis=0, initial=0)
        way[backbone] = encoders + (passing[backbone] + transfer[backbone]) * (problem.num_stages - 1)
        way[backbone + 1 :] = (
            encoders + passing[backbone] * parts + transfer[backbone] * (parts - 1) + transfer[backbone + 1 :]
        )
        found.append(way)
    return found[0], found[1]


def _empty(problem: PlacementProblem, row: int, count: int) -> int:
    """Microbatches without work that a rank of the row may have besides one with some; `count` sequences have work."""
    if row != problem.num_encoders:
        return problem.num_waves - 1
    needed = -(-count // problem.slots)
    return min(problem.num_waves - 1, problem.dp * problem.num_waves - needed)
