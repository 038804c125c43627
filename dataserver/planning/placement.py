"""Where each sequence of a step goes in the backbone."""

from dataclasses import dataclass

import numpy as np

from dataserver.planning.samples import I64


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
