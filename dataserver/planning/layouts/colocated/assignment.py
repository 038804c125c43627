"""Which rank takes which batch of each module: any assignment keeps the balance, but not all move as many bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64
from dataserver.planning.balancing import bytes_between_nodes, fewest_bytes, lower_peaks, peak_between_nodes

ROUNDS = 8
"""Most rounds in which all modules are reassigned: the first saves most, those after the fourth under 1 %."""

Assignment = Mapping[str, I64]
"""For each module int64 [ranks], a permutation: the rank of each of its batches."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the batches of one module hand to those of another."""

    source: str
    target: str
    traffic: I64
    """int64 [ranks, ranks]: bytes from each batch of the source to each of the target."""
    node: I64
    """int64 [ranks]: node of each rank."""

    def bytes_between_nodes(self, assigned: Assignment) -> int:
        """Bytes that leave their node."""
        return bytes_between_nodes(self.traffic, self.node[assigned[self.source]], self.node, assigned[self.target])

    def peak(self, assigned: Assignment) -> int:
        """Most bytes that one node sends or takes. Nodes do both at once: it bounds the time of the exchange."""
        return peak_between_nodes(self.traffic, self.node[assigned[self.source]], self.node, assigned[self.target])

    def seen_from(self, module: str, assigned: Assignment) -> tuple[I64, I64]:
        """Bytes between the other module's batches and its own, and the node of each of the other's.

        int64 [ranks, ranks] and int64 [ranks].
        """
        if module == self.target:
            return self.traffic, self.node[assigned[self.source]]
        return self.traffic.T, self.node[assigned[self.target]]


def as_numbered(modules: Sequence[str], ranks: int) -> Assignment:
    """Rank i takes batch i of every module."""
    return {module: np.arange(ranks) for module in modules}


def assign_batches(numbered: Assignment, exchanges: Sequence[Exchange]) -> dict[str, I64]:
    """The rank of each batch of each module (OrchMLLM, sections "Node-wise All-to-All" and "Global Orchestrator").

    First the assignment that leaves the fewest bytes between nodes. Then, since an exchange takes as long as its
    busiest node, batches of one module after the other are reassigned to lower the sum of the peaks, within the bytes
    of `numbered`, until no module can or the rounds are spent. Neither bytes nor peaks come out above those of
    `numbered` (`as_numbered`): if the fewest bytes raise the peaks, it is what these are lowered from.
    """
    if not exchanges:
        return dict(numbered)
    assigned = _with_fewest_bytes(numbered, exchanges)
    if sum(e.peak(assigned) for e in exchanges) > sum(e.peak(numbered) for e in exchanges):
        assigned = dict(numbered)
    most = sum(e.bytes_between_nodes(numbered) for e in exchanges)
    for _ in range(ROUNDS):
        before = dict(assigned)
        for module in numbered:
            own = [e for e in exchanges if module in (e.source, e.target)]
            others = sum(e.bytes_between_nodes(assigned) for e in exchanges if module not in (e.source, e.target))
            transfers = [e.seen_from(module, assigned) for e in own]
            assigned[module] = lower_peaks(assigned[module], transfers, exchanges[0].node, most - others)
        if all(np.array_equal(assigned[module], before[module]) for module in assigned):
            break
    return assigned


def _with_fewest_bytes(numbered: Assignment, exchanges: Sequence[Exchange]) -> dict[str, I64]:
    """The rank of each batch of each module.

    One module after the other gets the best assignment there is while all others keep theirs (against those before and
    after it together), until no module alone can save a byte or the rounds are spent. Modules that others hand rows to
    come before those that only hand on.
    """
    assigned, node = dict(numbered), exchanges[0].node
    targets = {e.target for e in exchanges}
    order = sorted(numbered, key=lambda module: module not in targets)
    for _ in range(ROUNDS):
        saved = False
        for module in order:
            transfers = [e.seen_from(module, assigned) for e in exchanges if module in (e.source, e.target)]
            if not transfers:
                continue
            moved, there = (np.concatenate(parts) for parts in zip(*transfers, strict=True))
            better = fewest_bytes(moved, there, node)
            old, new = (bytes_between_nodes(moved, there, node, rank) for rank in (assigned[module], better))
            if new < old:
                assigned[module], saved = better, True
        if not saved:
            break
    return assigned
