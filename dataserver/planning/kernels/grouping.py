"""Kernels of the sequence-parallel planner.

Sequences come sorted, longest first. `times` is int64 [n, degrees]: nanoseconds of a sequence in a group of degree
`min_degree << column`. `floors` is int64 [n]: the first column whose group holds the sequence. The cluster has `cells`
of `min_degree` devices; a cell holds `cell_tokens`. A composition is int64 [degrees], its groups are numbered smallest
degree first. The caller makes sure that times of a whole batch, multiplied by the cells, stay in int64.
"""

from typing import NamedTuple

import numpy as np

from dataserver.planning import I64, Bool
from dataserver.planning.kernels.arrays import copy_to, first_largest, largest
from dataserver.planning.kernels.compiler import kernel, part
from dataserver.planning.kernels.heap import sort_by

NEVER = 1 << 62
"""Longer than anything takes, ns."""

FIRST_LOOK = 8
"""Compositions tried before the bounds are tightened with what they found."""

CLOSE = 9
"""A composition is tried only if its bound is lower than the best makespan by more than about 1/2^CLOSE."""


def chunk_bounds(lengths: I64, num_chunks: int) -> I64:
    """Bounds of the chunks; see `grouped.search.chunk_bounds`. int64 [num_chunks + 1]."""
    n = len(lengths)
    prefix, best, previous = np.zeros((3, n + 1), np.int64)
    cuts, bounds = np.zeros((num_chunks + 1, n + 1), np.int64), np.zeros(num_chunks + 1, np.int64)
    _chunk_bounds(lengths, prefix, best, previous, cuts, bounds)
    return bounds


@kernel
def _chunk_bounds(lengths: I64, prefix: I64, best: I64, previous: I64, cuts: I64, bounds: I64) -> None:
    # best[e]: tokens of the largest chunk if the first e sequences are cut in the best way; cuts[k, e]: where the last
    # of k chunks then begins.
    n, num_chunks = len(lengths), len(bounds) - 1
    for k in range(n):
        prefix[k + 1] = prefix[k] + lengths[k]
    copy_to(best, prefix)
    for chunk in range(2, num_chunks + 1):
        copy_to(previous, best)
        cut = chunk - 1
        for end in range(chunk, n + 1):
            # As the cut moves on, the last chunk falls and what is before it rises: the best cut never moves back.
            while cut + 1 < end and max(previous[cut + 1], prefix[end] - prefix[cut + 1]) < max(
                previous[cut], prefix[end] - prefix[cut]
            ):
                cut += 1
            best[end] = max(previous[cut], prefix[end] - prefix[cut])
            cuts[chunk, end] = cut
    bounds[num_chunks] = n
    for chunk in range(num_chunks, 1, -1):
        bounds[chunk - 1] = cuts[chunk, bounds[chunk]]


class Scratch(NamedTuple):
    """What the search for a grouping works on: d degrees, c compositions, n sequences, the most groups of any.

    `limits`, `tokens` and `left` are int64 [d], `starts` int64 [d + 1], `loads`, `free` and `order` int64 [groups], and
    `group` int64 [n].
    """

    best_group: I64
    """int64 [n]: group of each sequence in the best grouping."""
    bounds: I64
    """int64 [c]: lower bound of the time of each composition."""
    by_bound: I64
    """int64 [c]: the compositions by that bound, least first."""
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


def _scratch(num_sequences: int, compositions: I64) -> Scratch:
    num, degrees = compositions.shape
    bounds, by_bound = np.empty((2, num), np.int64)
    limits, tokens, left = np.empty((3, degrees), np.int64)
    column, loads, free, order = np.empty((4, int(compositions.sum(axis=1).max(initial=0))), np.int64)
    best_group, group = np.full((2, num_sequences), -1, np.int64)
    starts = np.empty(degrees + 1, np.int64)
    return Scratch(best_group, bounds, by_bound, limits, tokens, left, starts, column, loads, free, order, group)


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
def _least_exchange(tokens: I64, left: I64, penalties: I64) -> int:
    """Exchange time that tokens add at least to the least work, ps on one cell; NEVER if there is no room.

    Tokens [degrees], by the smallest degree open to them, go to the cheapest degree with room `left`, those of the
    longest sequences first: a minimum-weight basis, because the sets of open degrees are nested. Changes `left`.
    """
    penalty = 0
    for f in range(len(tokens) - 1, -1, -1):
        rest = tokens[f]
        for j in range(f, len(tokens)):
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
    for c in range(num):
        single = NEVER
        for j in range(floors[0], columns):
            if compositions[c, j]:
                single = min(single, times[0, j])
        for j in range(columns):
            left[j] = compositions[c, j] * limits[j]
        exchange = _least_exchange(tokens, left, penalties)
        if exchange < NEVER:
            bounds[c] = max((work + exchange // 1000) // cells, single)


@part
def _number_groups(composition: I64, column: I64) -> int:
    """Fill in the column of each group. Returns the number of groups."""
    g = 0
    for j in range(len(composition)):
        for _ in range(composition[j]):
            column[g] = j
            g += 1
    return g


@part
def _choose(
    length: int,
    time: I64,
    floor: int,
    starts: I64,
    loads: I64,
    free: I64,
    order: I64,
    limit: int,
) -> tuple[int, int]:
    """Position in `order` and column of the group that would finish first, before `limit`; -1 if there is none."""
    chosen, column, finish = -1, -1, limit
    for j in range(floor, len(starts) - 1):
        for position in range(starts[j], starts[j + 1]):
            g = order[position]
            if loads[g] + time[j] >= finish:
                break  # by load: those that follow end no sooner
            if free[g] >= length:
                chosen, column, finish = position, j, loads[g] + time[j]
                break
    return chosen, column


@part
def assign(
    lengths: I64, times: I64, floors: I64, cell_tokens: int, composition: I64, spare: int, limit: int, scratch: Scratch
) -> int:
    """Longest first to the group that finishes first and has room; ties to the smaller degree, then to the group
    that took a sequence last, then the lower one.

    Given up as soon as a sequence would end at `limit`, or groups larger than needed have used up the `spare` time that
    the cells have until then beside the least work.

    Fills in the scratch's `column`, `loads`, `free` (tokens) and `group`.

    Returns:
        The number of groups; 0 if given up.
    """
    loads, free, order, group, starts = scratch.loads, scratch.free, scratch.order, scratch.group, scratch.starts
    num = _number_groups(composition, scratch.column)
    starts[0] = 0  # groups of column j: order[starts[j] : starts[j + 1]], by load
    for j in range(len(composition)):
        starts[j + 1] = starts[j] + composition[j]
    for g in range(num):
        loads[g], free[g], order[g] = 0, cell_tokens << scratch.column[g], g
    for k in range(len(lengths)):
        position, column = _choose(lengths[k], times[k], floors[k], starts, loads, free, order, limit)
        if position < 0:
            return 0
        g = order[position]
        loads[g] += times[k, column]
        free[g] -= lengths[k]
        group[k] = g
        spare -= (times[k, column] << column) - (times[k, floors[k]] << floors[k])
        if spare <= 0:
            return 0
        while position + 1 < starts[column + 1] and loads[order[position + 1]] < loads[g]:
            order[position] = order[position + 1]
            position += 1
        order[position] = g
    return num


@part
def _best_change(
    lengths: I64, times: I64, floors: I64, column: I64, loads: I64, free: I64, group: I64, last: int
) -> tuple[int, int, int]:
    """The move or swap after which group `last` and its partner end soonest, earlier than `last` does now.

    Returns:
        (sequence of `last`, sequence that it is swapped with or -1, partner); the first is -1 if nothing helps.
    """
    n, mine = len(lengths), column[last]
    best, first, second, target = loads[last], -1, -1, -1
    for k in range(n):
        if group[k] != last:
            continue
        rest = loads[last] - times[k, mine]
        for g in range(len(loads)):
            if g == last or column[g] < floors[k] or free[g] < lengths[k]:
                continue
            value = max(rest, loads[g] + times[k, column[g]])
            if value < best:
                best, first, second, target = value, k, -1, g
        for m in range(n):
            g = group[m]
            more = lengths[k] - lengths[m]
            if g == last or more > free[g] or -more > free[last]:
                continue
            value = max(rest + times[m, mine], loads[g] - times[m, column[g]] + times[k, column[g]])
            if value < best:
                best, first, second, target = value, k, m, g
    return first, second, target


@part
def improve(
    lengths: I64, times: I64, floors: I64, column: I64, loads: I64, free: I64, group: I64, max_moves: int
) -> int:
    """Moves and swaps that relieve the group that finishes last, each the best there is, at most `max_moves`.

    Changes `loads`, `free` and `group`.

    Returns:
        The makespan.
    """
    for _ in range(max_moves):
        last = first_largest(loads)
        first, second, target = _best_change(lengths, times, floors, column, loads, free, group, last)
        if first < 0:
            break
        for k, source, sink in ((first, last, target), (second, target, last)):
            if k >= 0:
                loads[source] -= times[k, column[source]]
                free[source] += lengths[k]
                loads[sink] += times[k, column[sink]]
                free[sink] -= lengths[k]
                group[k] = sink
    return largest(loads)


def best_grouping(
    lengths: I64,
    times: I64,
    floors: I64,
    cell_tokens: int,
    penalties: I64,
    compositions: I64,
    cells: int,
    limit: int,
    max_moves: int,
    easiest: int,
) -> tuple[int, int, I64]:
    """The composition and placement that finish first: greedy placement of each composition, then local improvement.

    Compositions are tried by ascending bound and given up as soon as they cannot beat the best one; the search ends
    when none can beat it by more than 1/2^CLOSE. Ties go to the earlier composition. Arguments as those of
    `composition_bounds`.

    Returns:
        (makespan, composition, int64 [n] group of each sequence); composition is -1 if nothing stays under `limit`.
    """
    scratch = _scratch(len(lengths), compositions)
    time, chosen = _best_grouping(
        lengths, times, floors, cell_tokens, penalties, compositions, cells, limit, max_moves, easiest, scratch
    )
    return time, chosen, scratch.best_group


@kernel
def _best_grouping(
    lengths: I64,
    times: I64,
    floors: I64,
    cell_tokens: int,
    penalties: I64,
    compositions: I64,
    cells: int,
    limit: int,
    max_moves: int,
    easiest: int,
    scratch: Scratch,
) -> tuple[int, int]:
    bounds, by_bound = scratch.bounds, scratch.by_bound
    chosen, whole = -1, 0
    for k in range(len(lengths)):
        longest = 0
        for j in range(floors[k], times.shape[1]):
            longest = max(longest, times[k, j])
        whole += longest  # no placement takes longer than the sum
    # `batch._refuse_overflow` keeps whole * cells under 2^60, so that best * cells fits.
    best, work = min(limit, 2 * whole + 2), _least_work(times, floors)
    for look in range(2):
        composition_bounds(lengths, times, floors, cell_tokens, penalties, compositions, cells, best, easiest, scratch)
        sort_by(bounds, by_bound)
        for position in range(len(by_bound)):
            c = by_bound[position]
            if bounds[c] + (bounds[c] >> CLOSE) >= best or (look == 0 and position == FIRST_LOOK):
                break
            spare = best * cells - work
            num = assign(lengths, times, floors, cell_tokens, compositions[c], spare, best, scratch)
            if num == 0:
                continue
            column, loads, free = scratch.column[:num], scratch.loads[:num], scratch.free[:num]
            best = improve(lengths, times, floors, column, loads, free, scratch.group, max_moves)
            chosen = c
            copy_to(scratch.best_group, scratch.group)
    return best, chosen


def fill(
    lengths: I64,
    times: I64,
    cell_tokens: int,
    composition: I64,
    group: I64,
    extra_lengths: I64,
    extra_times: I64,
    extra_floors: I64,
    deadline: int,
) -> Bool:
    """Adds sequences of another microbatch, longest first, where a group still ends by `deadline`.

    Each goes to the smallest degree that takes it, there to the group that is done first. `lengths`, `times` and
    `group` describe the microbatch, `extra_*` the candidates.

    Returns:
        bool [extra], those that found a place.
    """
    taken = np.zeros(len(extra_lengths), np.bool_)
    column, loads, free = np.zeros((3, int(composition.sum())), np.int64)
    _fill(
        lengths, times, cell_tokens, composition, group, extra_lengths, extra_times, extra_floors, deadline, column,
        loads, free, taken,
    )  # fmt: skip
    return taken


@kernel
def _fill(
    lengths: I64,
    times: I64,
    cell_tokens: int,
    composition: I64,
    group: I64,
    extra_lengths: I64,
    extra_times: I64,
    extra_floors: I64,
    deadline: int,
    column: I64,
    loads: I64,
    free: I64,
    taken: Bool,
) -> None:
    for g in range(_number_groups(composition, column)):
        free[g] = cell_tokens << column[g]
    for k in range(len(lengths)):
        loads[group[k]] += times[k, column[group[k]]]
        free[group[k]] -= lengths[k]
    for k in range(len(extra_lengths)):
        chosen = -1
        for g in range(len(column)):
            j = column[g]
            if chosen >= 0 and column[chosen] < j:
                break  # columns ascend: from here on only larger degrees
            fits = j >= extra_floors[k] and free[g] >= extra_lengths[k] and loads[g] + extra_times[k, j] <= deadline
            if fits and (chosen < 0 or loads[g] < loads[chosen]):
                chosen = g
        if chosen >= 0:
            loads[chosen] += extra_times[k, column[chosen]]
            free[chosen] -= extra_lengths[k]
            taken[k] = True
