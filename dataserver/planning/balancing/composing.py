"""Composition of two arrangements of the same items into one routing."""

from dataclasses import dataclass

import numpy as np

from dataserver.planning.samples import I64


@dataclass(frozen=True, slots=True)
class Places:
    """Where the items of an arrangement are: a one-to-one map from items to (rank, position)."""

    item: I64
    """int64 [n], distinct."""
    rank: I64
    """int64 [n]."""
    position: I64
    """int64 [n]: where the item is in the rank's buffer."""


@dataclass(frozen=True, slots=True)
class Hop:
    """A one-to-one map from (rank, position) to (rank, position), sorted by source. int64 [n] each."""

    source_rank: I64
    source_position: I64
    target_rank: I64
    target_position: I64


def compose(first: Places, second: Places) -> Hop:
    """The one hop that takes every item from its place in `first` to its place in `second`.

    With P_E and P_M the maps from the sampling layout to two modules' arrangements this is P_M after the inverse of P_E
    (OrchMLLM, rearrangement composition): outputs go straight to where the next module wants them, with no detour
    through the sampling layout. The backward pass takes `compose(second, first)`.

    Raises:
        ValueError: the two do not hold the same items once each, or two items share a place.
    """
    for places in (first, second):
        if len(np.unique(places.item)) != len(places.item):
            raise ValueError("an item is placed twice; every item has one place")
        if np.unique(np.stack((places.rank, places.position)), axis=1).shape[1] != len(places.item):
            raise ValueError("two items share a place; every item has its own")
    by_source, by_target = np.lexsort((first.position, first.rank)), np.argsort(second.item, kind="stable")
    wanted = first.item[by_source]
    if not np.array_equal(np.sort(wanted), second.item[by_target]):
        raise ValueError("the two place different items; only arrangements of the same items compose")
    there = by_target[np.searchsorted(second.item[by_target], wanted)]
    return Hop(first.rank[by_source], first.position[by_source], second.rank[there], second.position[there])
