"""Compiled loops of the sequence-parallel planner. Import only inside the functions that need them: numba is heavy.

Sequences come sorted, longest first. `times` is int64 [n, degrees]: nanoseconds of a sequence in a group of degree
`min_degree << column`. `floors` is int64 [n]: the first column whose group holds the sequence. A group of column j
holds `room << j` tokens and weighs `1 << j` units; `units` is the cluster in that unit. Nothing here overflows while
the time of a whole batch on one unit, times the units, stays under 2^63 ns.
"""

import numpy as np

from dataserver.planning.kernels import kernel
from dataserver.planning.samples import I64

UNPLACED = -1
"""Result of a placement that was given up."""

NEVER = 1 << 62
"""A time that nothing takes."""

FIRST_LOOK = 8
"""Compositions tried before the bounds are tightened with what they found."""

CLOSE = 9
"""A composition has to promise more than 1/2^CLOSE to be tried."""


@kernel
def chunk_bounds(lengths: I64, num_chunks: int) -> I64:
    """Bounds of the chunks; see chunking.chunk_bounds. int64 [num_chunks + 1]."""
    n = len(lengths)
    prefix = np.zeros(n + 1, np.int64)
    prefix[1:] = np.cumsum(lengths)
    best = prefix.copy()
    cuts = np.zeros((num_chunks + 1, n + 1), np.int64)
    for chunk in range(2, num_chunks + 1):
        previous = best.copy()
        cut = chunk - 1
        for end in range(chunk, n + 1):
            # As the cut moves on, the last chunk's sum falls and what is before it rises: the best cut never moves back.
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


@kernel
def composition_bounds(
    lengths: I64, times: I64, floors: I64, room: int, penalties: I64, compositions: I64, units: int, limit: int
) -> I64:
    """A lower bound of each composition's makespan if that is to stay under `limit`; NEVER where it cannot. int64.

    Tokens go, those of the longest sequences first, to the cheapest degree that may hold them, as far as its groups have
    memory and, at the rate of the shortest sequence, time. That is the least communication (a minimum-weight basis: the
    degrees open to a sequence are nested). Work is spread over all units evenly.
    """
    num, columns = compositions.shape
    n = len(lengths)
    tokens = np.zeros(columns, np.int64)
    base, single = np.int64(0), np.int64(0)
    for k in range(n):
        tokens[floors[k]] += lengths[k]
        base += times[k, floors[k]] << floors[k]
    base -= n << (columns - 1)  # times are rounded down
    pace = np.zeros(columns, np.int64)
    for j in range(floors[n - 1], columns):
        pace[j] = (((limit << 10) // times[n - 1, j] + 1) * lengths[n - 1] >> 10) + 1
    bounds = np.empty(num, np.int64)
    left = np.empty(columns, np.int64)
    for c in range(num):
        for j in range(columns):
            left[j] = compositions[c, j] * min(room << j, pace[j])
        single, penalty, fits = NEVER, np.int64(0), True
        for j in range(floors[0], columns):
            if compositions[c, j]:
                single = min(single, times[0, j])
        for f in range(columns - 1, -1, -1):
            rest = tokens[f]
            for j in range(f, columns):
                taken = min(rest, left[j])
                left[j] -= taken
                rest -= taken
                penalty += taken * (penalties[j] - penalties[f])
                if rest == 0:
                    break
            if rest > 0:
                fits = False
                break
        bounds[c] = max((base + penalty // 1000) // units, single) if fits else NEVER
    return bounds


@kernel
def place(
    lengths: I64,
    times: I64,
    floors: I64,
    room: int,
    composition: I64,
    units: int,
    limit: int,
    loads: I64,
    free: I64,
    order: I64,
    group: I64,
) -> int:
    """Longest first to the group that finishes first and has room; ties to the smaller degree, then the lower group.

    Groups are numbered by column, smallest degree first. Fills `loads` and `free` [groups] and `group` [n].

    Returns:
        The makespan, or UNPLACED when it would reach `limit` or a sequence finds no room.
    """
    columns = len(composition)
    starts = np.zeros(columns + 1, np.int64)
    for j in range(columns):
        starts[j + 1] = starts[j] + composition[j]
        for g in range(starts[j], starts[j + 1]):
            loads[g], free[g], order[g] = 0, room << j, g
    smallest = np.full(columns, columns, np.int64)
    for j in range(columns - 1, -1, -1):
        smallest[j] = j if composition[j] else (smallest[j + 1] if j + 1 < columns else columns)
    remaining, used, makespan = 0, 0, 0
    for k in range(len(lengths)):
        if smallest[floors[k]] == columns:
            return UNPLACED
        remaining += times[k, smallest[floors[k]]] << smallest[floors[k]]
    for k in range(len(lengths)):
        chosen, finish, column = -1, limit, -1
        for j in range(smallest[floors[k]], columns):
            for position in range(starts[j], starts[j + 1]):
                g = order[position]
                if loads[g] + times[k, j] >= finish:
                    break
                if free[g] >= lengths[k]:
                    chosen, finish, column = position, loads[g] + times[k, j], j
                    break
        if chosen < 0:
            return UNPLACED
        g = order[chosen]
        loads[g] = finish
        free[g] -= lengths[k]
        group[k] = g
        makespan = max(makespan, finish)
        remaining -= times[k, smallest[floors[k]]] << smallest[floors[k]]
        used += times[k, column] << column
        if used + remaining >= limit * units:
            return UNPLACED
        while chosen + 1 < starts[column + 1] and loads[order[chosen + 1]] < finish:
            order[chosen] = order[chosen + 1]
            chosen += 1
        order[chosen] = g
    return makespan


@kernel
def improve(
    lengths: I64, times: I64, room: int, composition: I64, loads: I64, free: I64, group: I64, max_moves: int
) -> int:
    """Moves and swaps that relieve the group that finishes last, each the best of its kind, at most `max_moves`.

    Changes `loads`, `free` and `group`.

    Returns:
        The makespan.
    """
    n, num = len(lengths), 0
    column = np.empty(len(loads), np.int64)
    for j in range(len(composition)):
        for _ in range(composition[j]):
            column[num] = j
            num += 1
    for _ in range(max_moves):
        last = np.argmax(loads[:num])
        jl = column[last]
        best, first, second, target = loads[last], -1, -1, -1
        for k in range(n):
            if group[k] != last:
                continue
            for g in range(num):
                if g != last and free[g] >= lengths[k]:
                    value = max(loads[last] - times[k, jl], loads[g] + times[k, column[g]])
                    if value < best:
                        best, first, second, target = value, k, -1, g
            for m in range(n):
                g = group[m]
                if g == last or free[g] + lengths[m] < lengths[k] or free[last] + lengths[k] < lengths[m]:
                    continue
                value = max(
                    loads[last] - times[k, jl] + times[m, jl], loads[g] - times[m, column[g]] + times[k, column[g]]
                )
                if value < best:
                    best, first, second, target = value, k, m, g
        if first < 0:
            break
        loads[last] -= times[first, jl]
        free[last] += lengths[first]
        loads[target] += times[first, column[target]]
        free[target] -= lengths[first]
        group[first] = target
        if second >= 0:
            loads[target] -= times[second, column[target]]
            free[target] += lengths[second]
            loads[last] += times[second, jl]
            free[last] -= lengths[second]
            group[second] = last
    return loads[:num].max()


@kernel
def best_grouping(
    lengths: I64,
    times: I64,
    floors: I64,
    room: int,
    penalties: I64,
    compositions: I64,
    units: int,
    limit: int,
    max_moves: int,
) -> tuple[int, int, I64]:
    """The composition and placement that finish first: greedy placement of each composition, then local improvement.

    Compositions are tried by ascending bound and given up as soon as they cannot beat the best one; the search ends
    when none can beat it by more than 1/2^CLOSE. Ties go to the earlier composition.

    Returns:
        (makespan, composition, int64 [n] group of each sequence); composition is -1 if nothing stays under `limit`.
    """
    n = len(lengths)
    loads = np.empty(units, np.int64)
    free = np.empty(units, np.int64)
    order = np.empty(units, np.int64)
    group = np.empty(n, np.int64)
    best_group = np.full(n, -1, np.int64)
    chosen = -1
    best = np.int64(1)
    for k in range(n):
        best += times[k, floors[k] :].max()
    best = min(best, limit)
    for look in range(2):
        bounds = composition_bounds(lengths, times, floors, room, penalties, compositions, units, best)
        for position, c in enumerate(np.argsort(bounds, kind="mergesort")):
            if bounds[c] + (bounds[c] >> CLOSE) >= best or (look == 0 and position == FIRST_LOOK):
                break
            makespan = place(lengths, times, floors, room, compositions[c], units, best, loads, free, order, group)
            if makespan == UNPLACED:
                continue
            best = improve(lengths, times, room, compositions[c], loads, free, group, max_moves)
            chosen = c
            best_group[:] = group
    return best, chosen, best_group


@kernel
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
) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Adds sequences of another microbatch, longest first, where a group still ends by `deadline`.

    Each goes to the smallest degree that takes it, there to the group that is done first. `lengths`, `times` and `group`
    describe the microbatch, `extra_*` the candidates.

    Returns:
        bool [extra], those that found a place.
    """
    num = composition.sum()
    loads, free, column = np.zeros(num, np.int64), np.empty(num, np.int64), np.empty(num, np.int64)
    g = 0
    for j in range(len(composition)):
        for _ in range(composition[j]):
            column[g], free[g] = j, room << j
            g += 1
    for k in range(len(lengths)):
        loads[group[k]] += times[k, column[group[k]]]
        free[group[k]] -= lengths[k]
    taken = np.zeros(len(extra_lengths), np.bool_)
    for k in range(len(extra_lengths)):
        chosen = -1
        for g in range(num):
            j = column[g]
            if chosen >= 0 and column[chosen] < j:
                break
            fits = j >= extra_floors[k] and free[g] >= extra_lengths[k] and loads[g] + extra_times[k, j] <= deadline
            if fits and (chosen < 0 or loads[g] < loads[chosen]):
                chosen = g
        if chosen >= 0:
            loads[chosen] += extra_times[k, column[chosen]]
            free[chosen] -= extra_lengths[k]
            taken[k] = True
    return taken
