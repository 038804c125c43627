"""Modality parity: in every wave all ranks of the backbone have images or none has."""

import numpy as np

from dataserver.planning import I64, Bool
from dataserver.planning.layouts.pipelined.placing.problem import PlacementProblem
from dataserver.planning.plan.placement import Placement, in_slots, of_slots


def with_parity(problem: PlacementProblem, placement: Placement) -> Placement:
    """The placement with as many exchanges of sequences as parity takes; as it is where the problem asks for none.

    Waves in which most ranks have images keep them. In each of these a rank without any gets a sequence with some, from
    a wave of its own that is to have none if it can, and gives one without for it; costly sequences are exchanged for
    costly ones. Where there are too few sequences with images for all ranks, or one too many for whole waves, one wave
    remains in which only some have any.
    """
    if problem.images is None or not problem.images.any():
        return placement
    slots, has = in_slots(problem.shape, placement), problem.images > 0  # the last one is an empty slot's
    load = np.append(problem.balanced_by, 0)
    needs = _needs_images(has[slots].sum(axis=2), problem.slots)
    free = _Slots(slots, has, load)
    leaving, shortfall = free.with_images(~needs), free.shortfall(needs)
    leaving, shortfall = free.exchange(leaving, shortfall, within_ranks=True)
    if len(shortfall) > len(leaving):
        leaving = np.concatenate([leaving, free.spare(needs)[: len(shortfall) - len(leaving)]])
    leaving, _ = free.exchange(leaving, shortfall, within_ranks=False)
    for within_ranks in (True, False) if len(leaving) else ():  # those that are left join others in a microbatch
        leaving, _ = free.exchange(leaving, free.without_images(needs), within_ranks=within_ranks)
    return of_slots(slots)


def _needs_images(held: I64, slots: int) -> Bool:
    """The microbatches that are to have images, bool [ranks, waves]; `held` counts the sequences with some.

    Those of all ranks in as many waves as now, as far as it comes out even, but for one wave of what is left over.
    """
    dp, count = len(held), int(held.sum())
    fewest, most = -(-count // (dp * slots)), count // dp
    waves = int(np.clip(-(-np.count_nonzero(held) // dp), fewest, max(fewest, most)))
    order = np.argsort(-np.count_nonzero(held, axis=0), kind="stable")
    needs = np.zeros(held.shape, np.bool_)
    needs[:, order[: min(waves, most)]] = True
    if waves > most:
        rest = order[most]
        needs[np.argsort(held[:, rest] == 0, kind="stable")[: count - most * dp], rest] = True
    return needs


class _Slots:
    """Slots under change. Places in them are flat indices, int64 [k], costly sequences first."""

    def __init__(self, slots: I64, has: Bool, load: I64) -> None:
        self._flat, self._shape = slots.reshape(-1), slots.shape
        self._has, self._load = has, load

    def with_images(self, where: Bool) -> I64:
        """Sequences with images in some microbatches."""
        return self._sorted(np.flatnonzero(np.repeat(where, self._shape[2]) & self._has[self._flat]))

    def without_images(self, where: Bool) -> I64:
        """Slots with other sequences, or none, in some microbatches."""
        return self._sorted(np.flatnonzero(np.repeat(where, self._shape[2]) & ~self._has[self._flat]))

    def shortfall(self, where: Bool) -> I64:
        """The costliest slot of each of some microbatches that have no images."""
        return self._first_of_each(self.without_images(where & ~self._any()))

    def spare(self, where: Bool) -> I64:
        """Sequences with images of some microbatches beyond one for each."""
        every = self.with_images(where)
        return np.setdiff1d(every, self._first_of_each(every))

    def exchange(self, some: I64, others: I64, within_ranks: bool) -> tuple[I64, I64]:
        """Exchange as many pairs as there are, within ranks alone or not; the places that are left over."""
        if not len(some) or not len(others):
            return some, others
        mine, yours = (self._numbered(places, within_ranks) for places in (some, others))
        _, a, b = np.intersect1d(mine, yours, assume_unique=True, return_indices=True)
        here, there = some[a], others[b]
        self._flat[here], self._flat[there] = self._flat[there], self._flat[here]
        return np.delete(some, a), np.delete(others, b)

    def _any(self) -> Bool:
        found: Bool = np.any(self._has[self._flat].reshape(self._shape), axis=2)
        return found

    def _sorted(self, places: I64) -> I64:
        return places[np.argsort(-self._load[self._flat[places]], kind="stable")]

    def _first_of_each(self, places: I64) -> I64:
        return places[np.sort(np.unique(places // self._shape[2], return_index=True)[1])]

    def _numbered(self, places: I64, within_ranks: bool) -> I64:
        """A number for each place by which pairs find each other: its position, or its rank and position therein."""
        if not within_ranks:
            return np.arange(len(places))
        rank = places // (self._shape[1] * self._shape[2])
        order = np.argsort(rank, kind="stable")
        position = np.empty(len(places), np.int64)
        position[order] = np.arange(len(places)) - np.searchsorted(rank[order], rank[order])
        number: I64 = rank * len(self._flat) + position
        return number
