"""Colocated layouts: arrangements of phases, names of their ranks, and the hops between them."""

from dataclasses import fields, replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.balancing import Memory, Places
from dataserver.planning.colocated.arranging import arrange_phases
from dataserver.planning.colocated.phases import Link, Phase, PhasePlan
from dataserver.planning.costs import forward_ns
from dataserver.planning.jobspec import Cost
from dataserver.planning.samples import I64

SIZES, NODES = st.integers(0, 60), st.integers(0, 2)


def numbers(data: st.DataObject, count: int, values: st.SearchStrategy[int]) -> I64:
    return np.array(data.draw(st.lists(values, min_size=count, max_size=count)), np.int64)


@st.composite
def steps(draw: st.DrawFn, max_ranks: int = 8) -> tuple[list[Phase], list[Link], I64]:
    """Up to three encoders, a backbone and perhaps a generator, of any cost, on any nodes."""
    data: st.DataObject = draw(st.data())
    num_samples = draw(st.integers(0, 12))

    def phase(name: str, sample: I64) -> Phase:
        return Phase(
            name=name,
            loads=numbers(data, len(sample), SIZES),
            sample=sample,
            constant_ns=draw(st.integers(0, 5)),
            padded=draw(st.booleans()),
        )

    phases = [phase("llm", np.arange(num_samples))]
    links = []
    for name in ["vit", "whisper", "video"][: draw(st.integers(0, 3))] + ["dit"] * draw(st.booleans()):
        count = draw(st.integers(0, 15)) if num_samples else 0
        sample = np.sort(numbers(data, count, st.integers(0, max(num_samples - 1, 0))))
        phases.insert(draw(st.integers(0, len(phases))), phase(name, sample))
        ends = [(name, np.arange(count)), ("llm", sample)]
        (source, source_item), (target, target_item) = reversed(ends) if name == "dit" else ends
        rows = numbers(data, count, st.integers(0, 9))
        links.append(Link(source, target, source_item, target_item, rows, draw(st.integers(1, 4))))
    num_ranks = draw(st.integers(1, max_ranks))
    most = [draw(st.none() | st.integers(-(-len(p.loads) // num_ranks), 16)) for p in phases]
    phases = [replace(p, capacity=capacity) for p, capacity in zip(phases, most, strict=True)]
    node = np.arange(num_ranks) // draw(st.integers(1, 3)) if draw(st.booleans()) else numbers(data, num_ranks, NODES)
    return phases, links, node


def crossing(links: list[Link], plan: PhasePlan, node: I64, renamed: str = "", names: I64 | None = None) -> int:
    """Bytes between nodes, entry by entry, perhaps with other names for the ranks of one phase."""
    total = 0
    for link in links:
        ends = []
        for name, item in ((link.source, link.source_item), (link.target, link.target_item)):
            rank = plan.arrangement(name).places.rank[item]
            ends.append(node[names[rank] if names is not None and name == renamed else rank])
        total += int((link.rows * link.row_bytes)[ends[0] != ends[1]].sum())
    return total


def busiest(links: list[Link], plan: PhasePlan, node: I64, names: dict[str, I64] | None = None) -> dict[str, int]:
    """Most bytes that a node sends or takes over each link, entry by entry, perhaps with other names of some ranks."""
    found = {}
    for link in links:
        ends = []
        for name, item in ((link.source, link.source_item), (link.target, link.target_item)):
            rank = plan.arrangement(name).places.rank[item]
            ends.append(node[names[name][rank] if names and name in names else rank])
        crossing = ends[0] != ends[1]
        moved = np.zeros((2, int(node.max()) + 1), np.int64)
        for direction, end in enumerate(ends):
            np.add.at(moved[direction], end[crossing], (link.rows * link.row_bytes)[crossing])
        found[f"{link.source} {link.target}"] = int(moved.max())
    return found


def slow_loads(phase: Phase, rank: I64, num_ranks: int) -> list[int]:
    loads = []
    for r in range(num_ranks):
        mine = phase.loads[rank == r].tolist()
        loads.append(phase.constant_ns + (len(mine) * max(mine, default=0) if phase.padded else sum(mine)))
    return loads


@given(steps())
@settings(max_examples=120, deadline=None)
def test_every_item_has_one_place_and_loads_are_those_of_its_rank(step: tuple[list[Phase], list[Link], I64]) -> None:
    phases, links, node = step
    plan = arrange_phases(phases, links, node)
    assert [a.name for a in plan.arrangements] == [p.name for p in phases]
    for phase, arrangement in zip(phases, plan.arrangements, strict=True):
        places = arrangement.places
        assert places.item.tolist() == list(range(len(phase.loads)))
        for r in range(len(node)):
            assert places.position[places.rank == r].tolist() == list(range(int((places.rank == r).sum())))
        assert arrangement.loads.tolist() == slow_loads(phase, places.rank, len(node))
        assert int(arrangement.loads.max()) >= arrangement.bound_ns
        if phase.capacity is not None:
            assert int(np.bincount(places.rank, minlength=len(node)).max()) <= phase.capacity
        if phase.padded:
            assert int(arrangement.loads.max()) == arrangement.bound_ns


@given(steps())
@settings(max_examples=80, deadline=None)
def test_names_change_no_load_and_never_cost_bytes(step: tuple[list[Phase], list[Link], I64]) -> None:
    """Without links there is nothing to name ranks by: loads are those, under other names."""
    phases, links, node = step
    plan, unnamed = arrange_phases(phases, links, node), arrange_phases(phases, [], node)
    for arrangement, before in zip(plan.arrangements, unnamed.arrangements, strict=True):
        batches = set(zip(before.places.rank.tolist(), arrangement.places.rank.tolist(), strict=True))
        assert len({b for b, _ in batches}) == len({r for _, r in batches}) == len(batches)
        assert sorted(arrangement.loads.tolist()) == sorted(before.loads.tolist())
        assert arrangement.bound_ns == before.bound_ns
    assert plan.bytes_between_nodes == crossing(links, plan, node)
    assert plan.identity_bytes == crossing(links, unnamed, node)
    assert plan.bytes_between_nodes <= plan.identity_bytes
    assert plan.peak_bytes == sum(busiest(links, plan, node).values())
    assert plan.identity_peak_bytes == sum(busiest(links, unnamed, node).values())
    assert plan.peak_bytes <= plan.identity_peak_bytes


@given(steps(max_ranks=5))
@settings(max_examples=120, deadline=None)
def test_no_swap_of_two_ranks_lowers_the_peaks(step: tuple[list[Phase], list[Link], I64]) -> None:
    """Unless it moved more bytes between nodes than batches that keep the ranks their numbers name."""
    phases, links, node = step
    plan = arrange_phases(phases, links, node)
    for phase in phases:
        for a, b in combinations(range(len(node)), 2):
            names = np.arange(len(node))
            names[[a, b]] = b, a
            if crossing(links, plan, node, phase.name, names) <= plan.identity_bytes:
                assert sum(busiest(links, plan, node, {phase.name: names}).values()) >= plan.peak_bytes


@pytest.mark.parametrize("per_node", [2, 4])
def test_few_bytes_on_eight_ranks(per_node: int) -> None:
    """Two encoders, a backbone and a generator: bytes and peaks well below those of ranks as numbered."""
    node = np.arange(8) // per_node
    for seed in range(3):
        plan = arrange_phases(*large_step(seed, 40), node)
        assert plan.bytes_between_nodes < 0.9 * plan.identity_bytes
        assert plan.peak_bytes < 0.9 * plan.identity_peak_bytes


def large_step(seed: int, num_samples: int) -> tuple[list[Phase], list[Link]]:
    draw = np.random.default_rng(seed)
    phases = [Phase("llm", draw.integers(1, 10**6, num_samples), np.arange(num_samples), capacity=num_samples // 8)]
    links = []
    for name, padded in (("vit", False), ("whisper", True), ("dit", False)):
        sample = np.sort(draw.integers(0, num_samples, 2 * num_samples))
        phases.append(Phase(name, draw.integers(1, 10**6, len(sample)), sample, padded=padded))
        own, theirs = (name, np.arange(len(sample))), ("llm", sample)
        (a, i), (b, j) = (theirs, own) if name == "dit" else (own, theirs)
        links.append(Link(a, b, i, j, draw.integers(0, 1_000, len(sample)), 8_192))
    return phases, links


def buffers(link: Link, item: I64, places: Places) -> dict[int, list[tuple[int, int]]]:
    """What a rank's buffer holds by definition: the rows (entry, number) of its items in their order."""
    found: dict[int, list[tuple[int, int]]] = {}
    for i in np.lexsort((places.position, places.rank)).tolist():
        for entry in np.flatnonzero(item == i).tolist():
            rows = [(entry, row) for row in range(int(link.rows[entry]))]
            found.setdefault(int(places.rank[i]), []).extend(rows)
    return found


@given(steps())
@settings(max_examples=60, deadline=None)
def test_one_hop_is_two_hops_row_by_row(step: tuple[list[Phase], list[Link], I64]) -> None:
    """Source layout -> layout of the samples -> target layout, and the one hop; every row where it belongs."""
    phases, links, node = step
    plan = arrange_phases(phases, links, node)
    for link, found in zip(links, plan.routings, strict=True):
        routing = found.routing
        assert routing == plan.routing(link.source, link.target).routing
        source = buffers(link, link.source_item, plan.arrangement(link.source).places)
        target = buffers(link, link.target_item, plan.arrangement(link.target).places)
        sampling = {row: (r, n) for r, rows in source.items() for n, row in enumerate(rows)}
        two_hops = {r: [source[sampling[row][0]][sampling[row][1]] for row in rows] for r, rows in target.items()}
        one_hop: dict[int, dict[int, tuple[int, int]]] = {r: {} for r in target}
        columns = (getattr(routing, f.name).tolist() for f in fields(routing) if f.name.endswith(("rank", "start")))
        for a, start, b, begin, rows in zip(*columns, routing.rows.tolist(), strict=True):
            for row in range(rows):
                assert begin + row not in one_hop[b]
                one_hop[b][begin + row] = source[a][start + row]
        assert {r: [rows[n] for n in range(len(rows))] for r, rows in one_hop.items()} == two_hops == target
        assert sorted(found.entry.tolist()) == list(range(len(link.rows)))
        assert routing.rows.tolist() == link.rows[found.entry].tolist()
        by_source = list(zip(routing.source_rank.tolist(), routing.source_start.tolist(), strict=True))
        assert by_source == sorted(by_source)
        assert not routing.source_microbatch.any()
        assert not routing.target_microbatch.any()


def test_same_input_same_plan() -> None:
    def words(plan: PhasePlan) -> list[list[int]]:
        places = [x.tolist() for a in plan.arrangements for x in (a.places.rank, a.places.position, a.loads)]
        hops = [r.routing for r in plan.routings]
        return places + [x.tolist() for h in hops for x in (h.source_start, h.target_rank, h.target_start)]

    node = np.arange(16) // 4
    first, again, other = (arrange_phases(*large_step(seed, 200), node) for seed in (1, 1, 2))
    assert words(first) == words(again) != words(other)


@given(st.permutations([200, 400, 600, 800, 1000] * 8))
@settings(max_examples=30, deadline=None)
def test_veomnis_check(lengths: list[int]) -> None:
    """VeOmni's ground truth for an encoder: 8 ranks of {200..1000}, shuffled, get equal sums of squares."""
    squares = Cost(linear_ps=0, quadratic_fs=10**6)
    loads = forward_ns(squares, np.array(lengths, np.int64))
    phases = [Phase("vit", loads, np.arange(40)), Phase("llm", np.ones(40, np.int64), np.arange(40), capacity=5)]
    here = np.arange(40)
    link = Link("vit", "llm", here, here, np.array(lengths, np.int64), 2)
    plan = arrange_phases(phases, [link], np.arange(8) // 4)
    assert plan.arrangement("vit").loads.tolist() == [2_200_000] * 8
    assert plan.arrangement("vit").bound_ns == 2_200_000
    assert plan.arrangement("llm").loads.tolist() == [5] * 8


@given(st.lists(st.integers(1, 10), min_size=1, max_size=6), st.integers(1, 3), st.integers(10, 60), st.booleans())
@settings(max_examples=80, deadline=None)
def test_padded_phases_keep_their_memory(sizes: list[int], num_ranks: int, cap: int, equal_counts: bool) -> None:
    """The fastest arrangement that keeps the cap; refused exactly if none does."""
    loads, need = np.array(sizes) * 7 + 2, np.array(sizes)
    memory = Memory(need, cap)
    most = -(-len(sizes) // num_ranks) if equal_counts else len(sizes)
    phase = Phase("whisper", loads, np.arange(len(sizes)), padded=True, capacity=most, memory=memory)

    def largest(values: I64, rank: tuple[int, ...]) -> int:
        return max(slow_loads(replace(phase, loads=values), np.array(rank), num_ranks))

    every = [r for r in product(range(num_ranks), repeat=len(sizes)) if max(r.count(k) for k in r) <= most]
    possible = [largest(loads, rank) for rank in every if largest(need, rank) <= cap]
    if possible:
        found = arrange_phases([phase], [], np.zeros(num_ranks, np.int64)).arrangement("whisper")
        assert largest(need, tuple(found.places.rank.tolist())) <= cap
        assert int(found.loads.max()) == found.bound_ns == min(possible)
    else:
        with pytest.raises(ValueError, match=r"phase whisper: .*items need \d+ of memory"):
            arrange_phases([phase], [], np.zeros(num_ranks, np.int64))


@given(st.integers(1, 6), st.data())
@settings(max_examples=60, deadline=None)
def test_packed_phases_keep_their_memory(num_ranks: int, data: st.DataObject) -> None:
    loads = numbers(data, 12, st.integers(0, 100))
    memory = Memory(numbers(data, 12, st.integers(0, 10)), 20 + 120 // num_ranks)
    plan = arrange_phases([Phase("vit", loads, np.arange(12), memory=memory)], [], np.zeros(num_ranks, np.int64))
    held = np.bincount(plan.arrangement("vit").places.rank, memory.need, num_ranks)
    assert held.max() <= memory.cap


@pytest.mark.parametrize("padded", [False, True])
def test_an_item_beyond_the_memory_of_a_rank_is_named(padded: bool) -> None:
    need = np.array([3, 900, 7])
    phase = Phase("vit", np.ones(3, np.int64), np.array([4, 5, 5]), padded=padded, memory=Memory(need, 500))
    with pytest.raises(ValueError, match="phase vit: item 1 of sample 5 alone needs 900 of memory, but a rank has 500"):
        arrange_phases([phase], [], np.zeros(2, np.int64))


def test_refusals() -> None:
    node, one = np.zeros(2, np.int64), np.ones(1, np.int64)
    vit, llm = Phase("vit", one, one), Phase("llm", one, one)
    here = np.zeros(1, np.int64)
    link = Link("vit", "llm", here, here, one, 2)
    for phases, links, message in (
        ([vit, vit], [], "distinct names"),
        ([vit, llm], [link, link], "distinct pairs"),
        ([vit, replace(llm, sample=node)], [], "phase llm has 1 loads and 2 samples"),
        ([vit], [link], "link from vit to llm: it must join two of the phases"),
        ([vit, llm], [replace(link, target="vit")], "must join two"),
        ([vit, llm], [replace(link, rows=node)], "differ in length"),
        ([vit, llm], [replace(link, rows=-one)], "-1 rows of 2 bytes"),
        ([vit, llm], [replace(link, target_item=one)], "items 1 to 1 of llm; it has items 0 to 0"),
        ([replace(vit, loads=-one)], [], "phase vit: loads from -1 to -1"),
        ([replace(vit, memory=Memory(node, 3))], [], "phase vit: memory of 2 items for loads of 1"),
    ):
        with pytest.raises(ValueError, match=message):
            arrange_phases(phases, links, node)
    with pytest.raises(ValueError, match="0 ranks"):
        arrange_phases([vit], [], node[:0])
    plan = arrange_phases([vit, llm], [link], node)
    with pytest.raises(ValueError, match=r"phase 'dit' is not in the plan; it has \['vit', 'llm'\]"):
        plan.arrangement("dit")
    with pytest.raises(ValueError, match="nothing goes from phase 'llm' to 'vit'"):
        plan.routing("llm", "vit")
