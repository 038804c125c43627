"""The planner's own search: compositions, greedy placement, local improvement, cuts, transfers between microbatches.

Beyond the paper's MILP for chunks of equal tokens (sections 3.3 and 3.5): the cuts between microbatches are searched
for time, and a microbatch that has idle groups takes sequences from another one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dataserver.planning.grouped.chunking import chunk_bounds
from dataserver.planning.grouped.compositions import group_compositions
from dataserver.planning.grouped.costs import GroupCosts
from dataserver.planning.samples import I64

UNLIMITED = 1 << 50
"""A time above every plan's, 13 days in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What bounds the search: numbers of steps, never time.

    Raises:
        ValueError: a field is negative, or no number of microbatches may be tried.
    """

    microbatch_counts: int = 5
    """Numbers of microbatches tried, from the fewest that memory allows (M' of section 3.5)."""
    moves: int = 64
    """Local improvements of one placement."""
    cuts: int = 24
    """Other cuts tried for each cut between microbatches."""
    rounds: int = 3
    """Times that all cuts are gone through, if there are several."""
    transfers: int = 8
    """Pairs of microbatches between which sequences are moved."""

    def __post_init__(self) -> None:
        if self.microbatch_counts < 1 or min(self.moves, self.cuts, self.rounds, self.transfers) < 0:
            raise ValueError(f"{self} needs microbatch_counts >= 1 and no negative field")


@dataclass(frozen=True, slots=True)
class Grouping:
    """One microbatch: sequences on the groups of one composition."""

    members: I64
    """int64 [n], indices into the sorted sequences, ascending."""
    composition: I64
    """int64 [degrees], groups of each degree."""
    group: I64
    """int64 [n], group of each member; groups are numbered smallest degree first."""
    time_ns: int
    """The last group's end, without the fixed time."""


class Batch:
    """A batch's sequences, longest first, with their times; `squares` as in `GroupCosts.times_ns`."""

    def __init__(
        self, lengths: I64, costs: GroupCosts, compositions: I64 | None = None, squares: I64 | None = None
    ) -> None:
        _refuse_overflow(lengths, lengths * lengths if squares is None else squares, costs)
        self.costs = costs
        self.lengths = lengths
        self.times = costs.times_ns(lengths, squares)
        # Attention per token, x 2^16: the sequence with the least takes the least time for each of its tokens.
        self._slope = lengths << 16 if squares is None else (squares << 16) // lengths
        self.floors = costs.floors(lengths)
        self.units = costs.num_devices // costs.degrees[0]
        self.room = costs.device_tokens * costs.degrees[0]
        if compositions is None:
            compositions = group_compositions(costs.num_devices, costs.degrees[0], costs.degrees[-1])
        self.compositions = compositions
        self.prefix = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        work = self.times << np.arange(len(costs.degrees))
        fits = np.arange(len(costs.degrees)) >= self.floors[:, None]
        least = np.where(fits, work, UNLIMITED << 10).min(axis=1)
        self._work = np.concatenate([np.zeros(1, np.int64), np.cumsum(least)])
        # A degree may exchange faster than a smaller one; the bound takes the best that is as large or larger.
        self._penalties = np.minimum.accumulate(np.array(costs.token_ps, np.int64)[::-1])[::-1].copy()

    @property
    def fewest(self) -> int:
        """Microbatches that the tokens need at least."""
        return -(-int(self.prefix[-1]) // self.costs.cluster_tokens)

    def bound(self, start: int, end: int) -> int:
        """No grouping of sequences [start, end) takes less: their work spread evenly, or the longest one alone."""
        if start == end:
            return 0
        longest = int(self.times[start, self.floors[start] :].min())
        return max(int(self._work[end] - self._work[start]) // self.units, longest)

    def group(self, members: I64, limit: int, max_moves: int) -> Grouping | None:
        """The best grouping found that takes less than `limit`."""
        from dataserver.planning.kernels import grouping

        if not len(members):
            return Grouping(members, self.compositions[0], members, 0) if limit > 0 else None
        lengths = self.lengths[members]
        if int(lengths.sum()) > self.costs.cluster_tokens:
            return None
        time, chosen, group = grouping.best_grouping(
            lengths,
            self.times[members],
            self.floors[members],
            self.room,
            self._penalties,
            self.compositions,
            self.units,
            limit,
            max_moves,
            int(self._slope[members].argmin()),
        )
        return None if chosen < 0 else Grouping(members, self.compositions[chosen], group, int(time))

    def takes(self, taker: Grouping, giver: Grouping) -> I64:
        """Members of `giver` that fit into idle groups of `taker` before it ends. int64, ascending."""
        from dataserver.planning.kernels import grouping

        mine, others = taker.members, giver.members
        taken = grouping.fill(
            self.lengths[mine],
            self.times[mine],
            self.room,
            taker.composition,
            taker.group,
            self.lengths[others],
            self.times[others],
            self.floors[others],
            taker.time_ns,
        )
        return others[taken]


def _refuse_overflow(lengths: I64, squares: I64, costs: GroupCosts) -> None:
    """The kernels multiply sums of times by units, tokens by picoseconds, and squares by femtoseconds, in int64."""
    quadratic = int(squares.max(initial=0)) // 1_000 * costs.quadratic_fs
    linear = int(lengths.max(initial=0)) * max(costs.token_ps)
    slowest = (quadratic + linear) // (1_000 * costs.degrees[0]) * len(lengths) * costs.num_devices
    exchange = int(lengths.sum()) * max(costs.token_ps)
    if slowest >= UNLIMITED << 10 or exchange >= 1 << 62 or quadratic >= 1 << 62:
        raise ValueError(
            f"{costs.name}: {len(lengths)} sequences with up to {int(lengths.max())} tokens take too much time to count"
            " in int64 nanoseconds; are the cost coefficients in their units (fs, ps, ns)?"
        )


def search(batch: Batch, budget: Budget) -> list[Grouping]:
    """The best microbatches found for a batch.

    Numbers of microbatches are tried from the fewest that memory allows; one whose bound cannot win is left out.

    Raises:
        ValueError: a sequence does not fit any group of the batch's compositions.
    """
    if not len(batch.lengths):
        return []
    best: list[Grouping] | None = None
    best_ns = UNLIMITED
    count, tried = batch.fewest, 0
    while best is None or tried < budget.microbatch_counts:
        fixed = count * batch.costs.fixed_ns
        if count > len(batch.lengths) or (best is not None and fixed + batch.bound(0, len(batch.lengths)) >= best_ns):
            break
        found = _Cuts(batch, budget).search(count)
        if found is not None:
            tried += 1
            found = _transfer(batch, found, budget)
            if (total := fixed + sum(g.time_ns for g in found)) < best_ns:
                best, best_ns = found, total
        count += 1
    if best is None:
        raise ValueError(
            f"{len(batch.lengths)} sequences, the longest of {int(batch.lengths[0])} tokens, do not fit the groups"
            f" allowed on {batch.costs.num_devices} devices of {batch.costs.device_tokens} tokens: allow larger groups"
        )
    return best


class _Cuts:
    """Search for the cuts between contiguous microbatches."""

    def __init__(self, batch: Batch, budget: Budget) -> None:
        self._batch, self._budget = batch, budget
        self._known: dict[tuple[int, int], Grouping] = {}

    def search(self, count: int) -> list[Grouping] | None:
        """Microbatches of equal tokens (eq. 24), then each cut moved as long as that saves time."""
        bounds = [int(b) for b in chunk_bounds(self._batch.lengths, count)]
        chunks: list[Grouping] = []
        for start, end in pairwise(bounds):
            chunk = self._chunk(start, end, UNLIMITED)
            if chunk is None:
                return None
            chunks.append(chunk)
        for _ in range(self._budget.rounds if count > 2 else 1):
            moved = [self._move(bounds, chunks, cut) for cut in range(1, count)]
            if not any(moved):
                break
        return chunks

    def _move(self, bounds: list[int], chunks: list[Grouping], cut: int) -> bool:
        """Move one cut to the best place found."""
        start, end, first = bounds[cut - 1], bounds[cut + 1], bounds[cut]
        for position in self._places(start, first, end):
            best = chunks[cut - 1].time_ns + chunks[cut].time_ns
            if self._batch.bound(start, position) + self._batch.bound(position, end) >= best:
                continue
            left = self._chunk(start, position, best - self._batch.bound(position, end))
            right = None if left is None else self._chunk(position, end, best - left.time_ns)
            if left is not None and right is not None:
                bounds[cut], chunks[cut - 1], chunks[cut] = position, left, right
        return bounds[cut] != first

    def _places(self, start: int, first: int, end: int) -> Iterator[int]:
        """Cuts at even steps of tokens on both sides of the first one, nearest first."""
        prefix, seen = self._batch.prefix, {start, first, end}
        each = max(1, self._budget.cuts // 2)
        for step in range(1, self._budget.cuts // 2 + 1):
            for target in (
                prefix[first] - (prefix[first] - prefix[start]) * step // each,
                prefix[first] + (prefix[end] - prefix[first]) * step // each,
            ):
                position = int(np.searchsorted(prefix, target))
                if position not in seen and start < position < end:
                    seen.add(position)
                    yield position

    def _chunk(self, start: int, end: int, limit: int) -> Grouping | None:
        known = self._known.get((start, end))
        if known is not None:
            return known if known.time_ns < limit else None
        found = self._batch.group(np.arange(start, end), limit, self._budget.moves)
        if found is not None:
            self._known[start, end] = found
        return found


def _transfer(batch: Batch, groupings: list[Grouping], budget: Budget) -> list[Grouping]:
    """Let microbatches with idle groups take sequences from others, which then finish sooner."""
    result = list(groupings)
    pairs = [(a, b) for a in range(len(result)) for b in range(len(result)) if a != b]
    for taker, giver in pairs[: budget.transfers]:
        taken = batch.takes(result[taker], result[giver])
        if not len(taken):
            continue
        left = np.setdiff1d(result[giver].members, taken, assume_unique=True)
        fewer = batch.group(left, result[giver].time_ns, budget.moves)
        more = batch.group(np.union1d(result[taker].members, taken), 2 * result[taker].time_ns, budget.moves)
        before = result[giver].time_ns + result[taker].time_ns
        if fewer is not None and more is not None and fewer.time_ns + more.time_ns < before:
            result[giver], result[taker] = fewer, more
    return result
