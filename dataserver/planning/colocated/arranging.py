"""Balanced arrangements of all phases, the names of their ranks, and the hops between them."""

from collections.abc import Mapping, Sequence

import numpy as np

from dataserver.planning.balancing import Places, compose, lower_bound, padded, traffic_between
from dataserver.planning.colocated.phases import Link, Phase, PhaseArrangement, PhasePlan, PhaseRouting
from dataserver.planning.colocated.relabelling import Exchanges, name_ranks
from dataserver.planning.plan import Routing
from dataserver.planning.samples import I64


def arrange_phases(phases: Sequence[Phase], links: Sequence[Link], node: I64) -> PhasePlan:
    """Plan a colocated step (OrchMLLM, sections "Post-Balancing", "Node-wise All-to-All", "Global Orchestrator").

    Every phase is balanced alone: packed by its balancer, padded by optimal runs. Then its batches get
    the ranks with which few bytes cross between nodes and none sends or takes much more than others, loads unchanged.
    Last, the arrangements at both ends of a link are composed into one routing; the backward pass takes it from target
    to source.

    Args:
        phases: distinct names.
        links: between phases that are given, at most one for each (source, target).
        node: int64 [ranks]: node of each rank.

    Raises:
        ValueError: items do not fit (naming phase, item and sample), or phases and links do not fit each other.
    """
    _check(phases, links, len(node))
    batches = {p.name: _spread(p, len(node)) for p in phases}
    traffic = [_traffic(link, batches, len(node)) for link in links]
    identity = {p.name: np.arange(len(node), dtype=np.int64) for p in phases}
    exchanges = Exchanges(links, traffic, node)
    names = name_ranks(identity, exchanges)
    arrangements = {p.name: _arrangement(p, names[p.name][batches[p.name]], len(node)) for p in phases}
    costs = [f(n) for n in (identity, names) for f in (exchanges.bytes_between_nodes, exchanges.peaks)]
    routings = []
    for link, same, same_peak, crossing, peak in zip(links, *costs, strict=True):
        routing, entry = _route(link, arrangements[link.source].places, arrangements[link.target].places)
        routings.append(PhaseRouting(routing, entry, same, crossing, same_peak, peak))
    return PhasePlan(tuple(arrangements.values()), tuple(routings))


def _check(phases: Sequence[Phase], links: Sequence[Link], num_ranks: int) -> None:
    """Refuse what does not fit together."""
    counts = {p.name: len(p.loads) for p in phases}
    pairs = {(link.source, link.target) for link in links}
    if num_ranks < 1 or len(counts) < len(phases) or len(pairs) < len(links):
        raise ValueError(
            f"{num_ranks} ranks, phases {[p.name for p in phases]}, links {[(k.source, k.target) for k in links]}; at "
            "least one rank, distinct names of phases and distinct pairs of links are required"
        )
    for phase in phases:
        if len(phase.sample) != len(phase.loads):
            raise ValueError(
                f"phase {phase.name} has {len(phase.loads)} loads and {len(phase.sample)} samples; each item needs one"
            )
    for link in links:
        where = f"link from {link.source} to {link.target}"
        if link.source == link.target or not {link.source, link.target} <= counts.keys():
            raise ValueError(f"{where}: it must join two of the phases {list(counts)}")
        if not len(link.source_item) == len(link.target_item) == len(link.rows):
            raise ValueError(f"{where}: source items, target items and rows differ in length; each entry needs all")
        if link.row_bytes < 0 or link.rows.min(initial=0) < 0:
            raise ValueError(f"{where}: {link.rows.min(initial=0)} rows of {link.row_bytes} bytes; neither is negative")
        for name, item in ((link.source, link.source_item), (link.target, link.target_item)):
            if len(item) and not 0 <= item.min() <= item.max() < counts[name]:
                raise ValueError(
                    f"{where}: items {item.min()} to {item.max()} of {name}; it has items 0 to {counts[name] - 1}"
                )


def _spread(phase: Phase, num_ranks: int) -> I64:
    """The batch of each item, int64 [k]."""
    _check_items(phase)
    try:
        return (padded if phase.padded else phase.balancer)(phase.loads, num_ranks, phase.capacity, phase.memory)
    except ValueError as error:
        raise ValueError(f"phase {phase.name}: {error}") from error


def _check_items(phase: Phase) -> None:
    """Refuse an item that fits no rank, by its sample; the balancers refuse the rest."""
    memory = phase.memory
    if memory is None or len(memory.need) != len(phase.loads) or not len(phase.loads):
        return
    item = int(memory.need.argmax())
    if memory.need[item] > memory.cap:
        raise ValueError(
            f"phase {phase.name}: item {item} of sample {phase.sample[item]} alone needs {memory.need[item]} of "
            f"memory, but a rank has {memory.cap}; raise the memory, or leave such samples out"
        )


def _arrangement(phase: Phase, rank: I64, num_ranks: int) -> PhaseArrangement:
    item = np.arange(len(rank), dtype=np.int64)
    places = Places(item, rank, _count_within(rank, item))
    loads = phase.rank_loads(rank, num_ranks)
    if phase.padded:  # the runs are optimal
        return PhaseArrangement(phase.name, places, loads, int(loads.max()))
    bound = phase.constant_ns + lower_bound(phase.loads, num_ranks, phase.capacity)
    return PhaseArrangement(phase.name, places, loads, bound)


def _traffic(link: Link, batches: Mapping[str, I64], num_ranks: int) -> I64:
    """Bytes from each batch of the source to each of the target. int64 [ranks, ranks]."""
    source, target = batches[link.source][link.source_item], batches[link.target][link.target_item]
    return traffic_between(source, target, link.rows * link.row_bytes, num_ranks, num_ranks)


def _route(link: Link, source: Places, target: Places) -> tuple[Routing, I64]:
    """The routing of a link, and the link's entry behind each of the routing's."""
    here, there = _entries(link.source_item, source), _entries(link.target_item, target)
    hop = compose(here, there)
    entry = np.lexsort((here.position, here.rank)).astype(np.int64)
    rows = link.rows[entry]
    routing = Routing(
        link.source,
        link.target,
        source_microbatch=np.zeros(len(rows), np.int64),
        source_rank=hop.source_rank,
        source_start=_rows_before(hop.source_rank, hop.source_position, rows),
        target_microbatch=np.zeros(len(rows), np.int64),
        target_rank=hop.target_rank,
        target_start=_rows_before(hop.target_rank, hop.target_position, rows),
        rows=rows,
    )
    return routing, entry


def _entries(item: I64, places: Places) -> Places:
    """The places of a link's entries, `item` int64 [k] being the item of each."""
    rank = places.rank[item]
    return Places(np.arange(len(item), dtype=np.int64), rank, _count_within(rank, places.position[item]))


def _count_within(rank: I64, key: I64) -> I64:
    """How many entries of the same rank have a lower key, or the same and a lower index. int64 [k]."""
    return _rows_before(rank, key, np.ones(len(rank), np.int64))


def _rows_before(rank: I64, key: I64, rows: I64) -> I64:
    """Rows of the entries that stand before each in its rank, by (key, index). int64 [k]."""
    order = np.lexsort((key, rank))
    ranks = rank[order]
    before = np.cumsum(rows[order]) - rows[order]
    start = np.empty(len(rank), np.int64)
    start[order] = before - before[np.searchsorted(ranks, ranks)] if len(rank) else before
    return start
