"""What limits a composition of groups: the time that sequences take at least, and a bound of its makespan.

Arguments are those of `kernels.grouping`.
"""

from typing import NamedTuple

import numpy as np

from dataserver.planning import I64
from dataserver.planning.kernels.compiler import part

NEVER = 1 << 62
"""Longer than anything takes, ns."""


class Scratch(NamedTuple):
    """What the search for a grouping works on: d degrees, c compositions, n sequences or more, the most groups of any.

    `limits`, `tokens` and `left` are int64 [d], `starts` int64 [d + 1], `loads`, `free` and `order` int64 [groups], and
    `group` int64 [n].
    """

    best_group: I64
    """int64 [n]: group of each sequence in the best grouping."""
    bounds: I64
    """int64 [c]: lower bound of the time of each composition."""
    by_bound: I64
    """int64 [c]: a heap of compositions by that bound, least on top; behind it those that were tried."""
    limits: I64
    tokens: I64
    left: I64
    starts: I64
    column: I64
    """int64 [groups]: of each group of the composition that is tried, in whose first places all stands."""
    loads: I64
    free: I64
    order: I64
    group: I64
    rest: I64
    """int64 [n + 1]: time on one cell that the sequences from each on take at least."""
    need: I64
    """int64 [d]: the same of those that no smaller degree can take."""
    least: I64
    """int64 [d]: the shortest time of a sequence."""
    heads: I64
    """int64 [d]: the least load of a group; NEVER without groups."""


def scratch_for(num_sequences: int, compositions: I64) -> Scratch:
    """For groupings of up to so many sequences. Not compiled."""
    num, degrees = compositions.shape
    bounds, by_bound = np.empty((2, num), np.int64)
    limits, tokens, left = np.empty((3, degrees), np.int64)
    column, loads, free, order = np.empty((4, int(compositions.sum(axis=1).max(initial=0))), np.int64)
    best_group, group = np.full((2, num_sequences), -1, np.int64)
    starts, rest = np.empty(degrees + 1, np.int64), np.empty(num_sequences + 1, np.int64)
    need, least, heads = np.empty((3, degrees), np.int64)
    return Scratch(
        best_group, bounds, by_bound, limits, tokens, left, starts, column, loads, free, order, group, rest, need,
        least, heads,
    )  # fmt: skip


@part
def _least_work(times: I64, floors: I64) -> int:
    """Time on one cell that the sequences take at least, each in its best degree, rounded down."""
    n, columns = len(floors), times.shape[1]
    work = 0
    for k in range(n):
        least = times[k, floors[k]] << floors[k]
        for j in range(floors[k] + 1, columns):
            least = min(least, times[k, j] << j)  # 2^j cells, for that time
        work += int(least)
    return work - (n << (int(columns) - 1))  # every time may have lost a nanosecond


@part
def _limit_tokens(
    lengths: I64, times: I64, floors: I64, cell_tokens: int, limit: int, easiest: int, limits: I64
) -> None:
    """Tokens that a group of each degree takes by `limit`, within its memory, at the pace of the easiest sequence."""
    for j in range(len(limits)):
        limits[j] = cell_tokens << j
        time = times[easiest, j]
        if j >= floors[easiest] and time > 0 and limit // time < 1 << 20:  # else memory decides
            # limit / time in units of 2^-10, rounded up; limits are below 2^51 ns (`batch.UNLIMITED`), lengths to 2^22
            limits[j] = min(limits[j], (((limit << 10) // time + 1) * lengths[easiest] >> 10) + 1)


@part
def _least_exchange(tokens: I64, lowest: int, left: I64, penalties: I64) -> int:
    """Exchange time that tokens add at least to the least work, ps on one cell; NEVER if there is no room.

    Tokens [degrees], by the smallest degree open to them, `lowest` or more, go to the cheapest degree with room `left`,
    those of the longest sequences first: a minimum-weight basis, because the sets of open degrees are nested. Changes
    `left`.
    """
    penalty = 0
    for f in range(len(tokens) - 1, lowest - 1, -1):
        rest = tokens[f]
        for j in range(f, len(tokens)):
            if rest == 0:
                break
            taken = min(rest, left[j])
            left[j] -= taken
            rest -= taken
            penalty += taken * (penalties[j] - penalties[f])
        if rest > 0:
            return NEVER
    return penalty


@part
def composition_bounds(
    lengths: I64,
    times: I64,
    floors: I64,
    cell_tokens: int,
    penalties: I64,
    compositions: I64,
    cells: int,
    limit: int,
    easiest: int,
    scratch: Scratch,
) -> None:
    """A lower bound of each composition's makespan if that is to stay under `limit`; NEVER where it cannot.

    The work and the exchange that cannot be avoided, spread evenly over all cells, and the longest sequence alone.

    Args:
        lengths: int64 [n], n >= 1.
        times: int64 [n, degrees].
        floors: int64 [n].
        cell_tokens: tokens of a cell.
        penalties: int64 [degrees], ascending: no larger degree takes less time of a cell per token, ps.
        compositions: int64 [compositions, degrees].
        cells: of the cluster.
        limit: ns.
        easiest: the sequence that takes the least time for each of its tokens.
        scratch: its `bounds` are filled in, ns.
    """
    num, columns = compositions.shape
    bounds, limits, tokens, left = scratch.bounds, scratch.limits, scratch.tokens, scratch.left
    work = _least_work(times, floors)
    _limit_tokens(lengths, times, floors, cell_tokens, limit, easiest, limits)
    tokens[:] = 0
    for k in range(len(lengths)):
        tokens[floors[k]] += lengths[k]
    bounds[:] = NEVER
    lowest = floors[len(floors) - 1]  # that of the shortest sequence
    for c in range(num):
        for j in range(lowest, columns):
            left[j] = compositions[c, j] * limits[j]
        exchange = _least_exchange(tokens, lowest, left, penalties)
        if exchange == NEVER:
            continue
        evenly = (work + exchange // 1000) // cells
        if evenly < limit:
            single = NEVER
            for j in range(floors[0], columns):
                if compositions[c, j]:
                    single = min(single, times[0, j])
            bounds[c] = max(evenly, single)


@part
def needs(times: I64, floors: I64, limit: int, scratch: Scratch) -> bool:
    """Time on one cell that the sequences take at least if each ends before `limit`; False if one cannot.

    Fills in the scratch's `rest`, `need` and `least`.
    """
    columns, rest, need, shortest = times.shape[1], scratch.rest, scratch.need, scratch.least
    need[:] = 0
    shortest[:] = NEVER
    rest[len(floors)] = 0
    for k in range(len(floors) - 1, -1, -1):
        first, least = -1, NEVER
        for j in range(floors[k], columns):
            if times[k, j] < limit:
                first = j if first < 0 else first
                least = min(least, times[k, j] << j)
                shortest[j] = min(shortest[j], times[k, j])
        if first < 0:
            return False
        rest[k] = rest[k + 1] + least
        need[first] += least
    for j in range(columns - 2, -1, -1):
        need[j] += need[j + 1]
    return True


@part
def holds(composition: I64, need: I64, limit: int) -> bool:
    """Whether the groups of each degree and above have as much time until `limit` as is needed there."""
    cells = 0
    for j in range(len(need) - 1, -1, -1):
        cells += composition[j] << j
        if need[j] and need[j] >= cells * limit:
            return False
    return True
