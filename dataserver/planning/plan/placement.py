"""Where each sequence of a step goes in the backbone."""

from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64


@dataclass(frozen=True, slots=True)
class Placement:
    """Rank, microbatch and slot of each sequence, int64 [s] each."""

    rank: I64
    wave: I64
    slot: I64


def in_order(rank: I64, wave: I64, num_waves: int) -> Placement:
    """The placement whose microbatches hold their sequences in order."""
    place = rank * num_waves + wave
    order = np.argsort(place, kind="stable")
    slot = np.empty_like(place)
    slot[order] = np.arange(len(place)) - np.searchsorted(place[order], place[order])
    return Placement(rank, wave, slot)


def in_slots(shape: tuple[int, int, int], placement: Placement) -> I64:
    """int64 [ranks, microbatches, slots]: the sequence in each slot, -1 for none."""
    slots = np.full(shape, -1, np.int64)
    slots[placement.rank, placement.wave, placement.slot] = np.arange(len(placement.rank))
    return slots


def of_slots(slots: I64) -> Placement:
    """The placement that `in_slots` shows; all sequences are in it."""
    rank, wave, slot = np.nonzero(slots >= 0)
    found = Placement(*(np.empty(len(rank), np.int64) for _ in range(3)))
    placed = slots[rank, wave, slot]
    found.rank[placed], found.wave[placed], found.slot[placed] = rank, wave, slot
    return found
