"""Compiled loops of the sequence-parallel planner. Import only inside the functions that call them: numba is heavy.

Sequences come sorted, longest first. `times` is int64 [n, degrees]: nanoseconds of a sequence in a group of degree
`min_degree << column`. `floors` is int64 [n]: the first column whose group holds the sequence. The cluster has `cells`
of `min_degree` devices; a cell holds `room` tokens. A composition is int64 [degrees], its groups are numbered smallest
degree first. The caller makes sure that times of a whole batch, multiplied by the cells, stay in int64.
"""

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.kernels import allocating_kernel, allocating_part, part
from dataserver.planning.kernels.arrays import copy_to, first_largest, largest
from dataserver.planning.kernels.heap import sort_by
from dataserver.planning.samples import I64

UNPLACED = -1
"""Result of a placement that was given up."""

NEVER = 1 << 62
"""Longer than anything takes, ns."""

FIRST_LOOK = 8
"""Compositions tried before the bounds are tightened with what they found."""

CLOSE = 9
"""A composition is tried only if its bound is lower than the best makespan by more than about 1/2^CLOSE."""


@allocating_kernel
def chunk_bounds(lengths: I64, num_chunks: int) -> I64:
    """Bounds of the chunks; see `grouped.search.chunk_bounds`. int64 [num_chunks + 1]."""
    n = len(lengths)
    prefix = np.zeros(n + 1, np.int64)
    for k in range(n):
        prefix[k + 1] = prefix[k] + lengths[k]
    # best[e]: tokens of the largest chunk if the first e sequences are cut in the best way; cuts[k, e]: where the last
    # of k chunks then begins.
    best, previous = np.empty_like(prefix), np.empty_like(prefix)
    copy_to(best, prefix)
    cuts = np.zeros((num_chunks + 1, n + 1), np.int64)
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
    bounds = np.zeros(num_chunks + 1, np.int64)
    bounds[num_chunks] = n
    for chunk in range(num_chunks, 1, -1):
        bounds[chunk - 1] = cuts[chunk, bounds[chunk]]
    return bounds


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


@allocating_part
def _token_limits(lengths: I64, times: I64, floors: I64, room: int, limit: int, easiest: int) -> I64:
    """Tokens that a group of each degree takes by `limit`, within its memory, at the pace of the easiest sequence."""
    columns = times.shape[1]
    limits = np.empty(columns, np.int64)
    for j in range(columns):
        limits[j] = room << j
        time = times[easiest, j]
        if j >= floors[easiest] and time > 0 and limit // time < 1 << 20:  # else memory decides
            # limit / time in units of 2^-10, rounded up; limits are below 2^51 ns (`batch.UNLIMITED`), lengths to 2^22
            limits[j] = min(limits[j], (((limit << 10) // time + 1) * lengths[easiest] >> 10) + 1)
    return limits


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


@allocating_part
def composition_bounds(
    lengths: I64,
    times: I64,
    floors: I64,
    room: int,
    penalties: I64,
    compositions: I64,
    cells: int,
    limit: int,
    easiest: int,
) -> I64:
    """A lower bound of each composition's makespan if that is to stay under `limit`; NEVER where it cannot.

    The work and the exchange that cannot be avoided, spread evenly over all cells, and the longest sequence alone.

    Args:
        lengths: int64 [n], n >= 1.
        times: int64 [n, degrees].
        floors: int64 [n].
        room: tokens of a cell.
        penalties: int64 [degrees], ascending: no larger degree takes less time of a cell per token, ps.
        compositions: int64 [compositions, degrees].
        cells: of the cluster.
        limit: ns.
        easiest: the sequence that takes the least time for each of its tokens.

    Returns:
        int64 [compositions], ns.
    """
    num, columns = compositions.shape
    work = _least_work(times, floors)
    limits = _token_limits(lengths, times, floors, room, limit, easiest)
    tokens = np.zeros(columns, np.int64)
    for k in range(len(lengths)):
        tokens[floors[k]] += lengths[k]
    bounds, left = np.empty(num, np.int64), np.empty(columns, np.int64)
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
    return bounds


@allocating_part
def _columns(composition: I64) -> I64:
    """The column of each group. int64 [groups]."""
    num = 0
    for count in composition:
        num += count
    column, g = np.empty(num, np.int64), 0
    for j in range(len(composition)):
        for _ in range(composition[j]):
            column[g] = j
            g += 1
    return column


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


@allocating_part
def place(
    lengths: I64, times: I64, floors: I64, room: int, composition: I64, spare: int, limit: int
) -> tuple[int, I64, I64, I64]:
    """Longest first to the group that finishes first and has room; ties to the smaller degree, then the lower group.

    Given up as soon as a sequence would end at `limit`, or groups larger than needed have used up the `spare` time that
    the cells have until then beside the least work.

    Returns:
        (makespan or UNPLACED, int64 [groups] loads, int64 [groups] free tokens, int64 [n] group of each sequence).
    """
    column_of = _columns(composition)
    columns, num = len(composition), len(column_of)
    loads, free, order = np.zeros(num, np.int64), np.empty(num, np.int64), np.empty(num, np.int64)
    group = np.empty(len(lengths), np.int64)
    starts = np.zeros(columns + 1, np.int64)  # groups of column j: order[starts[j] : starts[j + 1]], by load
    for j in range(columns):
        starts[j + 1] = starts[j] + composition[j]
    for g in range(num):
        free[g], order[g] = room << column_of[g], g
    makespan = 0
    for k in range(len(lengths)):
        position, column = _choose(lengths[k], times[k], floors[k], starts, loads, free, order, limit)
        if position < 0:
            return UNPLACED, loads, free, group
        g = order[position]
        loads[g] += times[k, column]
        free[g] -= lengths[k]
        group[k] = g
        makespan = max(makespan, loads[g])
        spare -= (times[k, column] << column) - (times[k, floors[k]] << floors[k])
        if spare <= 0:
            return UNPLACED, loads, free, group
        while position + 1 < starts[column + 1] and loads[order[position + 1]] < loads[g]:
            order[position] = order[position + 1]
            position += 1
        order[position] = g
    return makespan, loads, free, group


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


@allocating_part
def improve(
    lengths: I64, times: I64, floors: I64, composition: I64, loads: I64, free: I64, group: I64, max_moves: int
) -> int:
    """Moves and swaps that relieve the group that finishes last, each the best there is, at most `max_moves`.

    Changes `loads`, `free` and `group`.

    Returns:
        The makespan.
    """
    column = _columns(composition)
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


@allocating_kernel
def best_grouping(
    lengths: I64,
    times: I64,
    floors: I64,
    room: int,
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
    best_group, by_bound = np.empty(len(lengths), np.int64), np.empty(len(compositions), np.int64)
    best_group[:] = -1
    chosen, whole = -1, 0
    for k in range(len(lengths)):
        longest = 0
        for j in range(floors[k], times.shape[1]):
            longest = max(longest, times[k, j])
        whole += longest  # no placement takes longer than the sum
    # `batch._refuse_overflow` keeps whole * cells under 2^60, so that best * cells fits.
    best, work = min(limit, 2 * whole + 2), _least_work(times, floors)
    for look in range(2):
        bounds = composition_bounds(lengths, times, floors, room, penalties, compositions, cells, best, easiest)
        sort_by(bounds, by_bound)
        for position in range(len(by_bound)):
            c = by_bound[position]
            if bounds[c] + (bounds[c] >> CLOSE) >= best or (look == 0 and position == FIRST_LOOK):
                break
            spare = best * cells - work
            makespan, loads, free, group = place(lengths, times, floors, room, compositions[c], spare, best)
            if makespan == UNPLACED:
                continue
            best = improve(lengths, times, floors, compositions[c], loads, free, group, max_moves)
            chosen, best_group = c, group
    return best, chosen, best_group


@allocating_kernel
def fill(
    lengths: I64,
    times: I64,
    room: int,
    composition: I64,
    group: I64,
    extra_lengths: I64,
    extra_times: I64,
    extra_floors: I64,
    deadline: int,
) -> NDArray[np.bool_]:
    """Adds sequences of another microbatch, longest first, where a group still ends by `deadline`.

    Each goes to the smallest degree that takes it, there to the group that is done first. `lengths`, `times` and
    `group` describe the microbatch, `extra_*` the candidates.

    Returns:
        bool [extra], those that found a place.
    """
    column = _columns(composition)
    loads, free = np.zeros(len(column), np.int64), np.empty(len(column), np.int64)
    for g in range(len(column)):
        free[g] = room << column[g]
    for k in range(len(lengths)):
        loads[group[k]] += times[k, column[group[k]]]
        free[group[k]] -= lengths[k]
    taken = np.zeros(len(extra_lengths), np.bool_)
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
    return taken
