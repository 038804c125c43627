"""Compositions, chunks and buckets against brute force."""

import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_rows.flexsp_buckets import bucket_ends, equal_interval_ends, rounded_up
from planning_rows.flexsp_profiles import A100_CLUSTER, PROFILES, group_costs, usable_lengths

from dataserver.planning import yielding_to
from dataserver.planning.layouts.grouped.batch import Batch
from dataserver.planning.layouts.grouped.compositions import group_compositions
from dataserver.planning.layouts.grouped.costs import GroupCosts
from dataserver.planning.layouts.grouped.homogeneous import homogeneous_plan
from dataserver.planning.layouts.grouped.search import UNLIMITED, Budget, _Cuts, chunk_bounds, search

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=9)


def test_published_numbers_of_compositions() -> None:
    assert len(group_compositions(64, 2)) == 202
    assert len(group_compositions(64)) == 1_828


@pytest.mark.parametrize("devices", [1, 2, 3, 6, 8, 12, 16])
def test_compositions_are_all_there_are(devices: int) -> None:
    parts = [1 << p for p in range(devices.bit_length())]
    expected = {
        counts
        for counts in itertools.product(*(range(devices // part + 1) for part in parts))
        if sum(c * p for c, p in zip(counts, parts, strict=True)) == devices
    }
    rows = [tuple(row) for row in group_compositions(devices).tolist()]
    assert len(rows) == len(set(rows))
    assert set(rows) == expected
    assert rows == sorted(rows, key=lambda row: row[::-1], reverse=True)


def test_compositions_of_some_degrees() -> None:
    assert group_compositions(16, 4, 8).tolist() == [[0, 2], [2, 1], [4, 0]]
    assert (group_compositions(1024, 16) == group_compositions(64)).all()


def test_impossible_compositions_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot make up a cluster of 10"):
        group_compositions(10, 4)
    with pytest.raises(ValueError, match="min_degree 3 must be a power of two"):
        group_compositions(12, 3)
    with pytest.raises(ValueError, match=r"256 devices have 692004 compositions.*use min_degree 2"):
        group_compositions(256)


@given(LENGTHS, st.data())
def test_chunks_are_optimal(lengths: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(lengths)))
    bounds = chunk_bounds(np.array(lengths), count).tolist()

    def largest(cuts: list[int]) -> int:
        return max(sum(lengths[a:b]) for a, b in itertools.pairwise(cuts))

    ways = itertools.combinations(range(1, len(lengths)), count - 1)
    assert bounds[0] == 0
    assert bounds[-1] == len(lengths)
    assert all(a < b for a, b in itertools.pairwise(bounds))
    assert largest(bounds) == min(largest([0, *cuts, len(lengths)]) for cuts in ways)


@given(LENGTHS, st.data())
def test_buckets_are_optimal(lengths: list[int], data: st.DataObject) -> None:
    ascending = np.sort(np.array(lengths))
    count = data.draw(st.integers(1, len(lengths)))
    ends = bucket_ends(ascending, count)
    ways = itertools.combinations(range(1, len(lengths)), count - 1)
    errors = [int((rounded_up(ascending, np.array([*cuts, len(lengths)])) - ascending).sum()) for cuts in ways]
    assert int((rounded_up(ascending, ends) - ascending).sum()) == min(errors)


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 sequences cannot be cut into 3 chunks"):
        chunk_bounds(np.array([1, 2]), 3)
    with pytest.raises(ValueError, match="2 sequences cannot fill 0 buckets"):
        bucket_ends(np.array([1, 2]), 0)


@pytest.mark.parametrize(("name", "context", "worst"), [("7b-192k", 192_000, 220), ("7b-384k", 384_000, 224)])
def test_table_4(shared_data: Path, name: str, context: int, worst: int) -> None:
    """Largest share of error tokens over 40 batches: 2.20 and 2.24 % (the paper, over both: 2.3); naive: 22 % there."""
    lengths = usable_lengths(np.load(shared_data / "flexsp" / "wikipedia_lengths.npy"), context)
    costs = group_costs(PROFILES[name], A100_CLUSTER)
    dynamic, naive = [], []
    for batch in range(40):
        ordered = np.sort(lengths[512 * batch : 512 * (batch + 1)])[::-1]
        cuts = chunk_bounds(ordered, -(-int(ordered.sum()) // costs.cluster_tokens))
        chunks = [ordered[a:b][::-1] for a, b in itertools.pairwise(cuts)]
        for errors, ends in ((dynamic, bucket_ends), (naive, equal_interval_ends)):
            wrong = sum(int((rounded_up(c, ends(c, min(16, len(c)))) - c).sum()) for c in chunks)
            errors.append(wrong * 10_000 // int(ordered.sum()))
    assert max(dynamic) in (worst - 1, worst)
    assert 2_000 < max(naive) < 2_600


def test_a_static_plan_lets_others_have_a_turn() -> None:
    """For each of its microbatches; `packing.best_fit` does so by itself."""
    turns: list[None] = []
    with yielding_to(partial(turns.append, None)):
        plan = homogeneous_plan(np.full(256, 100), GroupCosts("toy", 8, (1, 2, 4, 8), 100, 0, (1,) * 4, 0), 8)
    assert len(turns) == len(plan.microbatches) == 37


def test_sequences_that_no_group_holds_are_refused_with_the_longest() -> None:
    costs = GroupCosts("toy", 8, (1, 2, 4, 8), 100, 0, (1,) * 4, 0)
    batch = Batch(np.array([150, 20]), costs, np.array([[8, 0, 0, 0]]))
    with pytest.raises(ValueError, match="2 sequences, the longest of 150 tokens, do not fit the groups"):
        search(batch, Budget())
    with pytest.raises(ValueError, match="2 sequences cannot be cut into 0 chunks"):
        chunk_bounds(np.array([2, 1]), 0)


def test_a_kept_microbatch_counts_below_a_limit_as_one_that_is_found_does() -> None:
    batch = Batch(np.array([40, 30, 20, 10]), GroupCosts("toy", 2, (1, 2), 100, 1_000_000, (1_000,) * 2, 0))
    cuts = _Cuts(batch, Budget())
    kept = cuts._chunk(0, 3, UNLIMITED)
    assert kept is not None
    for at_hand in (cuts, _Cuts(batch, Budget())):
        assert at_hand._chunk(0, 3, kept.time_ns) is None
        found = at_hand._chunk(0, 3, kept.time_ns + 1)
        assert found is not None
        assert found.time_ns == kept.time_ns
