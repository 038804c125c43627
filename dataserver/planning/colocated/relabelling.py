"""Which rank takes which batch of each phase: all names are balanced alike, but not all move as many bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dataserver.planning.balancing import bytes_between_nodes, lower_peaks, peak_between_nodes, relabel
from dataserver.planning.colocated.phases import Link
from dataserver.planning.samples import I64

ROUNDS = 8
"""Times that all phases are named anew at most: the first saves most there is, those after the fourth under 1 %."""


@dataclass(frozen=True, slots=True)
class Exchanges:
    """What the batches of linked phases exchange. Names map each phase to the rank of each of its batches."""

    links: Sequence[Link]
    traffic: Sequence[I64]
    """Of each link: int64 [ranks, ranks], bytes from each batch of the source to each of the target."""
    node: I64
    """int64 [ranks]: node of each rank."""

    def hops(self, name: str, names: Mapping[str, I64]) -> list[tuple[I64, I64]]:
        """Of each link of a phase: bytes between batches of the other phase and its own, and the nodes of the other's.

        int64 [ranks, ranks] and int64 [ranks] each.
        """
        return [
            (moved, self.node[names[link.source]]) if link.target == name else (moved.T, self.node[names[link.target]])
            for link, moved in zip(self.links, self.traffic, strict=True)
            if name in (link.source, link.target)
        ]

    def bytes_between_nodes(self, names: Mapping[str, I64], without: str | None = None) -> list[int]:
        """Of each link, those of one phase left out."""
        return [
            bytes_between_nodes(moved, self.node[names[link.source]], self.node, names[link.target])
            for link, moved in zip(self.links, self.traffic, strict=True)
            if without not in (link.source, link.target)
        ]

    def peaks(self, names: Mapping[str, I64]) -> list[int]:
        """Most bytes that one node sends or takes, of each link."""
        return [
            peak_between_nodes(moved, self.node[names[link.source]], self.node, names[link.target])
            for link, moved in zip(self.links, self.traffic, strict=True)
        ]


def name_ranks(identity: Mapping[str, I64], exchanges: Exchanges) -> dict[str, I64]:
    """The rank of each batch of each phase.

    First the names that leave the fewest bytes between nodes. Then, since a hop takes as long as its busiest node, the
    names of one phase after the other are changed to lower the sum of the links' peaks, within the identity's bytes,
    until no phase can or the rounds are spent. Neither bytes nor peaks come out above the identity's: if the first
    names raise the peaks, the identity is what they are lowered from.
    """
    names = _with_fewest_bytes(identity, exchanges)
    if sum(exchanges.peaks(names)) > sum(exchanges.peaks(identity)):
        names = dict(identity)
    most = sum(exchanges.bytes_between_nodes(identity))
    for _ in range(ROUNDS):
        before = dict(names)
        for name in identity:
            others = sum(exchanges.bytes_between_nodes(names, without=name))
            names[name] = lower_peaks(names[name], exchanges.hops(name, names), exchanges.node, most - others)
        if all(np.array_equal(names[name], before[name]) for name in names):
            break
    return names


def _with_fewest_bytes(identity: Mapping[str, I64], exchanges: Exchanges) -> dict[str, I64]:
    """The rank of each batch of each phase.

    One phase after the other gets the best names there are while all others keep theirs (optimal assignment against
    the phases before and after it together), until no phase alone can save a byte or the rounds are spent. Phases that
    others hand rows to are named before those that only hand on.
    """
    names, node = dict(identity), exchanges.node
    targets = {link.target for link in exchanges.links}
    order = sorted(identity, key=lambda name: name not in targets)
    for _ in range(ROUNDS):
        saved = False
        for name in order:
            hops = exchanges.hops(name, names)
            if not hops:
                continue
            moved, there = (np.concatenate(parts) for parts in zip(*hops, strict=True))
            better = relabel(moved, there, node)
            old, new = (bytes_between_nodes(moved, there, node, n) for n in (names[name], better))
            if new < old:
                names[name], saved = better, True
        if not saved:
            break
    return names
