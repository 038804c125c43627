"""What phases are given as, and what is planned for them."""

from dataclasses import dataclass

from dataserver.planning.balancing import Balancer, Memory, Places, bin_totals, searched
from dataserver.planning.plan import Routing
from dataserver.planning.samples import I64


@dataclass(frozen=True, slots=True)
class Phase:
    """The k items that one module handles in a step: images, audio clips, sequences."""

    name: str
    """Name of the module."""
    loads: I64
    """int64 [k]: forward nanoseconds of each item (`costs.forward_ns`)."""
    sample: I64
    """int64 [k]: the sample of each item, of a sequence its first; errors name it."""
    constant_ns: int = 0
    """Nanoseconds on every rank that no item causes."""
    balancer: Balancer = searched
    """What spreads them over the ranks, unless they are padded."""
    padded: bool = False
    """Whether items are padded to the longest of their rank, so that each costs as much as the costliest."""
    capacity: int | None = None
    """Items that a rank takes at most; with k / ranks, where that divides, ranks take equal counts."""
    memory: Memory | None = None
    """What each item needs of a rank's memory; padded, each needs as much as the largest of its rank."""

    def rank_loads(self, rank: I64, num_ranks: int) -> I64:
        """Forward nanoseconds of each rank if item i is on rank[i]. int64 [num_ranks]."""
        return self.constant_ns + bin_totals(self.loads, rank, num_ranks, padded=self.padded)


@dataclass(frozen=True, slots=True)
class Link:
    """Rows that one phase hands to another: k entries, such as the embeddings of an image to its sequence.

    Entries of one item are in its buffer in the order of the entries.
    """

    source: str
    """Phase whose output they are."""
    target: str
    """Phase whose input they are."""
    source_item: I64
    """int64 [k]: item of the source phase."""
    target_item: I64
    """int64 [k]: item of the target phase."""
    rows: I64
    """int64 [k]."""
    row_bytes: int
    """Bytes of one row: width x bytes of a number."""


@dataclass(frozen=True, slots=True)
class PhaseArrangement:
    """Where the items of a phase are."""

    name: str
    places: Places
    """Item i is places.item[i] = i; positions count from 0 in each rank, in the order of the items."""
    loads: I64
    """int64 [ranks]: forward nanoseconds of each rank."""
    bound_ns: int
    """The slowest rank of no arrangement falls below this."""


@dataclass(frozen=True, slots=True)
class PhaseRouting:
    """The one hop of a link, from the source's arrangement to the target's, and what it costs."""

    routing: Routing
    """One entry for each of the link's, sorted by (source rank, source start); the phase is microbatch 0."""
    entry: I64
    """int64 [k]: the link's entry that each entry of the routing moves."""
    identity_bytes: int
    """Bytes between nodes if every batch kept the rank that its number names."""
    bytes_between_nodes: int
    """Bytes between nodes as planned."""
    identity_peak_bytes: int
    """Most bytes that one node sends or takes, if every batch kept the rank that its number names."""
    peak_bytes: int
    """Most bytes that one node sends or takes, as planned. Nodes do both at once: it bounds the time of the hop."""


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """The arrangements of all phases of a step, and the routings between them, in the order they were given in."""

    arrangements: tuple[PhaseArrangement, ...]
    routings: tuple[PhaseRouting, ...]

    @property
    def identity_bytes(self) -> int:
        """Bytes between nodes of all links before ranks were named anew."""
        return sum(r.identity_bytes for r in self.routings)

    @property
    def bytes_between_nodes(self) -> int:
        """Bytes between nodes of all links; never above `identity_bytes`."""
        return sum(r.bytes_between_nodes for r in self.routings)

    @property
    def identity_peak_bytes(self) -> int:
        """Sum of the links' peaks before ranks were named anew; the hops of links follow each other."""
        return sum(r.identity_peak_bytes for r in self.routings)

    @property
    def peak_bytes(self) -> int:
        """Sum of the links' peaks; never above `identity_peak_bytes`."""
        return sum(r.peak_bytes for r in self.routings)

    def arrangement(self, name: str) -> PhaseArrangement:
        """The arrangement of a phase; ValueError names the ones there are."""
        for arrangement in self.arrangements:
            if arrangement.name == name:
                return arrangement
        raise ValueError(f"phase {name!r} is not in the plan; it has {[a.name for a in self.arrangements]}")

    def routing(self, source: str, target: str) -> PhaseRouting:
        """The routing from one phase to another; ValueError names the ones there are."""
        for found in self.routings:
            if (found.routing.source_module, found.routing.target_module) == (source, target):
                return found
        pairs = [(r.routing.source_module, r.routing.target_module) for r in self.routings]
        raise ValueError(f"nothing goes from phase {source!r} to {target!r}; the plan has {pairs}")
