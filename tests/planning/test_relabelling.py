"""Node-aware names of batches, and the composition of two arrangements."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.balancing import (
    Hop,
    Places,
    bytes_between_nodes,
    compose,
    longest_first,
    relabel,
    traffic_between,
)
from dataserver.planning.samples import I64


def draw_traffic(data: st.DataObject, sources: int, ranks: int) -> I64:
    cells = st.lists(st.integers(0, 9), min_size=sources * ranks, max_size=sources * ranks)
    return np.array(data.draw(cells), np.int64).reshape(sources, ranks)


@given(st.sampled_from([(2, 1), (4, 2), (6, 2), (6, 3), (5, 2)]), st.booleans(), st.data())
@settings(max_examples=60)
def test_equal_to_exhaustive_search(shape: tuple[int, int], scattered: bool, data: st.DataObject) -> None:
    ranks, per_node = shape
    node = np.arange(ranks) // per_node
    if scattered:
        node = np.array(data.draw(st.permutations(node.tolist())))
    traffic = draw_traffic(data, ranks, ranks)
    rank = relabel(traffic, node, node)
    assert sorted(rank.tolist()) == list(range(ranks))
    least = min(bytes_between_nodes(traffic, node, node, np.array(p)) for p in permutations(range(ranks)))
    assert bytes_between_nodes(traffic, node, node, rank) == least


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_equal_to_exhaustive_search_on_eight_ranks(per_node: int) -> None:
    node, every = np.arange(8) // per_node, np.array(list(permutations(range(8))))
    for seed in range(3):
        traffic = np.random.default_rng([seed, per_node]).integers(0, 10**6, (8, 8))
        crossing = np.array([[int(traffic[node != g, k].sum()) for g in range(8 // per_node)] for k in range(8)])
        least = int(crossing[np.arange(8), node[every]].sum(axis=1).min())
        assert bytes_between_nodes(traffic, node, node, relabel(traffic, node, node)) == least


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**32))
@settings(max_examples=40)
def test_never_above_the_identity_and_loads_unchanged(ranks: int, per_node: int, seed: int) -> None:
    draw, node = np.random.default_rng(seed), np.arange(ranks) // per_node
    size, source = draw.integers(1, 10**6, 5 * ranks), draw.integers(0, ranks, 5 * ranks)
    batch = longest_first(size, ranks, 5)
    traffic = traffic_between(source, batch, size, ranks, ranks)
    assert traffic.sum() == size.sum()
    rank = relabel(traffic, node, node)
    here = np.arange(ranks)
    assert bytes_between_nodes(traffic, node, node, rank) <= bytes_between_nodes(traffic, node, node, here)
    before, after = np.bincount(batch, size), np.bincount(rank[batch], size)
    assert sorted(before.tolist()) == sorted(after.tolist())
    moved = size[node[source] != node[rank[batch]]]
    assert bytes_between_nodes(traffic, node, node, rank) == moved.sum()


def test_a_batch_goes_where_its_bytes_are() -> None:
    """Batches 0 and 3 come from the other node and change places; 1 and 2 keep their ranks."""
    traffic = np.array([[0, 5, 1, 9], [0, 5, 1, 9], [9, 1, 5, 0], [9, 1, 5, 0]])
    node = np.array([0, 0, 1, 1])
    assert relabel(traffic, node, node).tolist() == [3, 1, 2, 0]
    assert bytes_between_nodes(traffic, node, node, np.arange(4)) == 2 * (9 + 1 + 1 + 9)
    assert bytes_between_nodes(traffic, node, node, np.array([3, 1, 2, 0])) == 2 * (0 + 1 + 1 + 0)


def test_sources_may_be_other_ranks_than_targets() -> None:
    traffic = np.array([[0, 7, 0, 0], [5, 0, 0, 6]])
    rank = relabel(traffic, np.array([3, 8]), np.array([3, 3, 8, 8]))
    assert bytes_between_nodes(traffic, np.array([3, 8]), np.array([3, 3, 8, 8]), rank) == 0


def test_refusals() -> None:
    node = np.zeros(2, np.int64)
    with pytest.raises(ValueError, match=r"traffic is \(2, 3\); 2 sources and 2 ranks"):
        relabel(np.zeros((2, 3), np.int64), node, node)
    with pytest.raises(ValueError, match="traffic from -1 to 0 bytes"):
        relabel(np.array([[0, 0], [0, -1]]), node, node)


def placements(data: st.DataObject, items: list[int], ranks: int) -> Places:
    """Items in any order on ranks, positions of a rank distinct but not dense."""
    places = data.draw(
        st.lists(
            st.tuples(st.integers(0, ranks - 1), st.integers(0, 99)),
            min_size=len(items),
            max_size=len(items),
            unique=True,
        )
    )
    order = data.draw(st.permutations(items))
    columns = np.array(places, np.int64).reshape(-1, 2)
    return Places(np.array(order, np.int64), columns[:, 0].copy(), columns[:, 1].copy())


def carried(hop: Hop, buffers: dict[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    """What lies where after a hop; every entry is moved."""
    sources = zip(hop.source_rank.tolist(), hop.source_position.tolist(), strict=True)
    targets = zip(hop.target_rank.tolist(), hop.target_position.tolist(), strict=True)
    moved = {target: buffers[source] for source, target in zip(sources, targets, strict=True)}
    assert len(moved) == len(buffers)
    return moved


@given(st.lists(st.integers(0, 10**9), max_size=20, unique=True), st.integers(1, 4), st.integers(1, 4), st.data())
def test_one_hop_is_two_hops(items: list[int], first_ranks: int, second_ranks: int, data: st.DataObject) -> None:
    """Encoder layout -> sampling layout -> backbone layout, and encoder layout -> backbone layout; and back."""
    encoder, backbone = placements(data, items, first_ranks), placements(data, items, second_ranks)
    sampling = Places(np.array(items, np.int64), np.zeros(len(items), np.int64), np.arange(len(items)))
    places = zip(encoder.rank.tolist(), encoder.position.tolist(), strict=True)
    start = dict(zip(places, encoder.item.tolist(), strict=True))
    hop = compose(encoder, backbone)
    assert carried(hop, start) == carried(compose(sampling, backbone), carried(compose(encoder, sampling), start))
    assert carried(compose(backbone, encoder), carried(hop, start)) == start
    by_source = list(zip(hop.source_rank.tolist(), hop.source_position.tolist(), strict=True))
    assert by_source == sorted(by_source)


def test_placements_that_do_not_compose() -> None:
    def place(item: list[int], rank: list[int], position: list[int]) -> Places:
        return Places(np.array(item), np.array(rank), np.array(position))

    good = place([4, 5], [0, 1], [0, 0])
    for bad, message in (
        (place([4, 6], [0, 1], [0, 0]), "different items"),
        (place([4], [0], [0]), "different items"),
        (place([4, 4], [0, 1], [0, 0]), "placed twice"),
        (place([4, 5], [1, 1], [3, 3]), "share a place"),
    ):
        for pair in ((good, bad), (bad, good)):
            with pytest.raises(ValueError, match=message):
                compose(*pair)
