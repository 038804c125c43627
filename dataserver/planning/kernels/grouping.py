"""Kernels of the sequence-parallel planner.

Sequences come sorted, longest first. `times` is int64 [n, degrees]: nanoseconds of a sequence in a group of degree
`min_degree << column`. `floors` is int64 [n]: the first column whose group holds the sequence. The cluster has `cells`
of `min_degree` devices; a cell holds `cell_tokens`. A composition is int64 [degrees], its groups are numbered smallest
degree first. The caller makes sure that times of a whole batch, multiplied by the cells, stay in int64.
"""

import numpy as np

from dataserver.planning import I64, Bool
from dataserver.planning.kernels.arrays import copy_to, first_largest, largest
from dataserver.planning.kernels.compiler import kernel, part
from dataserver.planning.kernels.compositions import NEVER, Scratch, composition_bounds, holds, needs
from dataserver.planning.kernels.heap import sift_down, sift_up

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
    heads: I64,
    limit: int,
) -> tuple[int, int]:
    """Position in `order` and column of the group that would finish first, before `limit`; -1 if there is none."""
    chosen, column, finish = -1, -1, limit
    for j in range(floor, len(heads)):
        if heads[j] + time[j] >= finish:
            continue
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
    lengths: I64, times: I64, floors: I64, cell_tokens: int, composition: I64, cells: int, limit: int, scratch: Scratch
) -> int:
    """Longest first to the group that finishes first and has room; ties to the smaller degree, then to the group
    that took a sequence last, then the lower one.

    Given up as soon as a sequence would end at `limit`, or the cells do not have as much time until then as the others
    need (the scratch's `rest`).

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
    left, least, heads = cells * limit, scratch.least, scratch.heads
    for j in range(len(heads)):
        heads[j] = 0 if composition[j] else NEVER
    for k in range(len(lengths)):
        position, column = _choose(lengths[k], times[k], floors[k], starts, loads, free, order, heads, limit)
        if position < 0:
            return 0
        g = order[position]
        loads[g] += times[k, column]
        free[g] -= lengths[k]
        group[k] = g
        left -= times[k, column] << column
        if loads[g] + least[column] >= limit:  # it takes no other
            left -= limit - loads[g] << column
        if left < scratch.rest[k + 1]:
            return 0
        while position + 1 < starts[column + 1] and loads[order[position + 1]] < loads[g]:
            order[position] = order[position + 1]
            position += 1
        order[position] = g
        heads[column] = loads[order[starts[column]]]
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
    scratch: Scratch,
) -> tuple[int, int, I64]:
    """The composition and placement that finish first: greedy placement of each composition, then local improvement.

    Compositions are tried by ascending bound and given up as soon as they cannot beat the best one; the search ends
    when none can beat it by more than 1/2^CLOSE. Ties go to the earlier composition. Arguments as those of
    `composition_bounds`; the scratch (`scratch_for`) is for as many sequences or more.

    Returns:
        (makespan, composition, int64 [n] group of each sequence); composition is -1 if nothing stays under `limit`.
    """
    time, chosen = _best_grouping(
        lengths, times, floors, cell_tokens, penalties, compositions, cells, limit, max_moves, easiest, scratch
    )
    return time, chosen, scratch.best_group[: len(lengths)].copy()


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
    best = min(limit, 2 * whole + 2)  # `batch._refuse_overflow` keeps whole * cells under 2^60: best * cells fits
    size = tried = 0
    can = needs(times, floors, best, scratch)
    for look in range(2 if can else 0):
        composition_bounds(lengths, times, floors, cell_tokens, penalties, compositions, cells, best, easiest, scratch)
        for c in by_bound[size : size + tried]:
            bounds[c] = NEVER  # once more it would be given up: as `best` falls, greedy placement goes no other way
        size = tried = 0
        for c in range(len(by_bound)):
            if bounds[c] + (bounds[c] >> CLOSE) < best:
                by_bound[size] = c
                size += 1
                sift_up(by_bound, size, bounds)
        while size and tried < (FIRST_LOOK if look == 0 else len(by_bound)):
            c = by_bound[0]
            if bounds[c] + (bounds[c] >> CLOSE) >= best:
                return best, chosen  # tighter bounds are no lower
            size -= 1
            by_bound[0], by_bound[size] = by_bound[size], c
            sift_down(by_bound, size, bounds)
            tried += 1
            if not holds(compositions[c], scratch.need, best):
                continue
            num = assign(lengths, times, floors, cell_tokens, compositions[c], cells, best, scratch)
            if num == 0:
                continue
            column, loads, free = scratch.column[:num], scratch.loads[:num], scratch.free[:num]
            group = scratch.group[: len(lengths)]
            best = improve(lengths, times, floors, column, loads, free, group, max_moves)
            chosen = c
            copy_to(scratch.best_group, group)
            if not needs(times, floors, best, scratch):
                return best, chosen
        if size == 0:
            break
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
