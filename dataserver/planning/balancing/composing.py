"""Composition of two arrangements of the same items into one routing."""

from dataclasses import dataclass

import numpy as np

from dataserver.planning.samples import I64


@dataclass(frozen=True, slots=True)
class Placement:
    """Where items are: a one-to-one map from items to (rank, position)."""

    item: I64
    """int64 [n], distinct."""
    rank: I64
    """int64 [n]."""
    position: I64
    """int64 [n]: place of the item in the rank's buffer."""


@dataclass(frozen=True, slots=True)
class Hop:
    """A routing from each place of one placement to a place of another, sorted by source. int64 [n] each."""

    source_rank: I64
    source_position: I64
    target_rank: I64
    target_position: I64


def compose(first: Placement, second: Placement) -> Hop:
    """The one hop that takes every item from its place in `first` to its place in `second`.

    With P_E and P_M the maps from the sampling layout to two modules' arrangements this is P_M after the inverse of P_E
    (OrchMLLM, rearrangement composition): outputs go straight to where the next module wants them, with no detour
    through the sampling layout. The backward pass takes `compose(second, first)`.

    Raises:
        ValueError: the two do not hold the same items once each, or two items share a place.
    """
    for placement in (first, second):
        if len(np.unique(placement.item)) != len(placement.item):
            raise ValueError("an item is placed twice; a placement holds every item once")
        places = np.stack((placement.rank, placement.position))
        if len(np.unique(places, axis=1).T) != len(placement.item):
            raise ValueError("two items share a place; a placement is one-to-one")
    by_source, by_target = np.lexsort((first.position, first.rank)), np.argsort(second.item, kind="stable")
    wanted = first.item[by_source]
    if not np.array_equal(np.sort(wanted), second.item[by_target]):
        raise ValueError("the placements hold different items; only arrangements of the same items compose")
    there = by_target[np.searchsorted(second.item[by_target], wanted)]
    return Hop(first.rank[by_source], first.position[by_source], second.rank[there], second.position[there])
