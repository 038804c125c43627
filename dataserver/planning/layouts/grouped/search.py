"""The planner's own search: compositions, greedy placement, local improvement, cuts, transfers between microbatches.

Beyond the paper's MILP for chunks of equal tokens (sections 3.3 and 3.5): the cuts between microbatches are searched
for time, and a microbatch that has idle groups takes sequences from another one.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np

from dataserver.planning import I64
from dataserver.planning.layouts.grouped.batch import UNLIMITED, Batch, Grouping


@dataclass(frozen=True, slots=True)
class Budget:
    """What bounds the search: numbers of steps, never time. At least one number of microbatches, none negative."""

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


DEFAULT_BUDGET = Budget()
"""Tens of milliseconds for 512 sequences on 64 devices."""


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
                position = bisect_left(prefix, target)
                if position not in seen and start < position < end:
                    seen.add(position)
                    yield position

    def _chunk(self, start: int, end: int, limit: int) -> Grouping | None:
        known = self._known.get((start, end))
        if known is not None:
            return known if known.time_ns < limit else None
        found = self._batch.group_run(start, end, limit, self._budget.moves)
        if found is not None:
            self._known[start, end] = found
        return found


def _transfer(batch: Batch, groupings: list[Grouping], budget: Budget) -> list[Grouping]:
    """Let microbatches with idle groups take sequences from others, which then finish sooner."""
    result = list(groupings)
    pairs = ((a, b) for a in range(len(result)) for b in range(len(result)) if a != b)  # thousands have millions
    for taker, giver in islice(pairs, budget.transfers):
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


def chunk_bounds(lengths: I64, num_chunks: int) -> I64:
    """Contiguous chunks whose largest token sum is smallest (FlexSP, section 3.5, eq. 24), exactly. O(n chunks).

    Sort the lengths, longest first, before: sequences of similar lengths then share a microbatch.

    Args:
        lengths: int64 [n], tokens.
        num_chunks: number of chunks, 1 to n.

    Returns:
        int64 [num_chunks + 1]: chunk i is [bounds[i], bounds[i + 1]); the earliest cuts among equals.

    Raises:
        ValueError: there cannot be that many chunks.
    """
    from dataserver.planning.kernels import grouping

    if not 1 <= num_chunks <= len(lengths):
        raise ValueError(f"{len(lengths)} sequences cannot be cut into {num_chunks} chunks; use 1 to {len(lengths)}")
    bounds: I64 = grouping.chunk_bounds(np.ascontiguousarray(lengths, np.int64), num_chunks)
    return bounds
