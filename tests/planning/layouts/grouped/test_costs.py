"""Constants, capacities and the data filter of FlexSP's cost model."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_rows.flexsp_profiles import A100_CLUSTER, PROFILES, Cluster, group_costs, usable_lengths

MIB_PER_MS = {2: "119.54", 4: "104.07", 8: "96.5", 16: "10.33", 32: "5.94", 64: "4.87"}


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("7b-192k", 6449),
        ("7b-384k", 6407),
        ("13b-192k", 6483),
        ("13b-384k", 6427),
        ("30b-192k", 6627),
        ("30b-384k", 6538),
    ],
)
def test_device_token_capacities(name: str, tokens: int) -> None:
    costs = group_costs(PROFILES[name], A100_CLUSTER)
    assert costs.device_tokens == tokens
    assert costs.cluster_tokens == 64 * tokens
    assert costs.degrees == (1, 2, 4, 8, 16, 32, 64)


@given(st.integers(1, 384_000), st.sampled_from(range(7)))
def test_times_are_the_papers_formula(length: int, column: int) -> None:
    # eq. 12 and 13 with the constants of the public code, exactly, in fractions of a millisecond
    degree = 1 << column
    computing = (Fraction("5.128e-6") * length**2 + Fraction("0.1839576") * length) / degree
    exchanged = Fraction(4 * 2 * 32 * 4096 * length * 2, 2**20 * degree)
    exchanging = exchanged / Fraction(MIB_PER_MS[degree]) if degree > 1 else Fraction(0)
    time = group_costs(PROFILES["7b-384k"], A100_CLUSTER).times_ns(np.array([length]))[0, column]
    assert abs(time - (computing + exchanging) * 10**6) <= 2 + length / 1000


def test_what_attention_takes_is_rounded_down_to_nanoseconds() -> None:
    costs = replace(group_costs(PROFILES["7b-384k"], A100_CLUSTER), quadratic_fs=2_000_000_000, token_ps=(0,) * 7)
    assert costs.times_ns(np.array([1, 1]), np.array([999, 3_001]))[:, 0].tolist() == [1_998_000, 6_002_000]


def test_share_of_the_exchange() -> None:
    # section 3.8 of the reference: 9.2 / 8.4 / 5.6 / 2.4 % in groups of 8, 66.7 / 64.5 / 53.8 / 32.4 % in groups of 64
    lengths = np.array([4, 8, 32, 128]) * 1024
    model = PROFILES["7b-192k"]
    bandwidth = dict(A100_CLUSTER.bandwidths)
    times = group_costs(model, A100_CLUSTER).times_ns(lengths)
    for degree, percents in ((8, [9.2, 8.4, 5.6, 2.4]), (64, [66.7, 64.5, 53.8, 32.4])):
        exchange = lengths * model.transfer_ps(bandwidth[degree]) / 1000 / degree
        shares = 100 * exchange / times[:, degree.bit_length() - 1]
        assert np.abs(shares - percents).max() < 0.06


def test_the_data_filter() -> None:
    kept = usable_lengths(np.array([1, 128, 129, 999, 1000, 5000], np.int32), 1000 + 128, 128)
    assert kept.tolist() == [128, 128, 256]
    assert kept.dtype == np.int64
    assert usable_lengths(np.array([191_872, 191_873]), 192_000).tolist() == [191_872]


def test_a_sequence_beyond_the_cluster_is_named() -> None:
    costs = group_costs(PROFILES["7b-192k"], A100_CLUSTER)
    assert costs.floors(np.array([1, 6449, 6450, 412_736])).tolist() == [0, 0, 1, 6]
    with pytest.raises(ValueError, match=r"sequence 1 has 412737 tokens.*holds 1 to 412736 in a group of 64"):
        costs.floors(np.array([5, 412_737]))
    with pytest.raises(ValueError, match="sequence 0 has 0 tokens"):
        costs.floors(np.array([0]))


def test_impossible_clusters_are_refused() -> None:
    model = PROFILES["30b-192k"]
    with pytest.raises(ValueError, match=r"leaves .* bytes for activations on each of 8 devices"):
        group_costs(model, replace(A100_CLUSTER, num_devices=8))
    with pytest.raises(ValueError, match=r"no bandwidth for groups of \[128\]"):
        group_costs(model, replace(A100_CLUSTER, num_devices=128))
    with pytest.raises(ValueError, match="min_degree 3"):
        group_costs(model, A100_CLUSTER, min_degree=3)
    with pytest.raises(ValueError, match="max_degree 128"):
        group_costs(model, A100_CLUSTER, max_degree=128)
    with pytest.raises(ValueError, match="bandwidth of degree 3"):
        Cluster(4, 2**30, ((3, 1),))
    with pytest.raises(ValueError, match="0 devices"):
        Cluster(0, 2**30, ())
    with pytest.raises(ValueError, match="linear_ps = 0"):
        replace(model, linear_ps=0)
    with pytest.raises(ValueError, match="fixed_ns = -1"):
        replace(model, fixed_ns=-1)
