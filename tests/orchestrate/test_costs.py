"""Bytes and nanoseconds that the solver counts with, by hand; `exhaustive` and the solver take them from one place."""

from dataclasses import replace

import pytest

from dataserver.planning.job.fields import ModelSize
from trainclient.layouts.contrastive.degrees import _interaction_ns
from trainclient.layouts.grouped.degrees import exchange_ps
from trainclient.orchestrate.choice import Problem
from trainclient.orchestrate.cluster import Cluster
from trainclient.orchestrate.costs import Option, gathering_ns, options, shard_bytes
from trainclient.orchestrate.networks import Network
from trainclient.orchestrate.sample_sizes import SampleSize
from trainclient.orchestrate.workload import Stream, workload

SMALL = Network("backbone", "backbone", ModelSize(2, 8, 16, 4, 2, 10))
"""Each block has 2 x 8 x (8 + 4) weights of attention and 3 x 8 x 16 of its MLP, each end 8 x 10."""
NODES = Cluster("a800", 16, 8, 10**10, 200, 10, 1000)
WORKLOAD = workload([SampleSize(1, 62, ())], Stream(4, 64))
BLOCKS, END = 2 * (192 + 384), 80
LOGITS = (1 << 26) * (2 + 2 * 4)


def option(tp: int = 1, recompute: bool = False, network: Network = SMALL) -> Option:
    made = options(network, WORKLOAD.load(network), NODES)
    return next(o for o in made if (o.tp, o.recompute) == (tp, recompute))


def test_parameters_are_those_of_a_devices_share() -> None:
    assert SMALL.parameters == BLOCKS + 2 * END
    assert option().static_bytes(1) == 6 * (BLOCKS + 2 * END) + LOGITS
    assert option().static_bytes(2) == 6 * (BLOCKS / 2 + END) + LOGITS
    assert option(2).static_bytes(1) == 6 * (BLOCKS / 2 + 2 * END) + LOGITS
    assert option(2).optimizer_bytes(1) == 12 * (BLOCKS / 2 + 2 * END)
    frozen = option(network=replace(SMALL, frozen=True, input_gradient=True))
    assert (frozen.static_bytes(1) - LOGITS, frozen.optimizer_bytes(1)) == (2 * (BLOCKS + 2 * END), 0)


def test_ranks_that_share_states_hold_their_part() -> None:
    whole = 6 * (BLOCKS + 2 * END) + 12 * (BLOCKS + 2 * END) / 4
    assert shard_bytes(option(), 4, whole=True) == whole + LOGITS
    gathered = 6 * (BLOCKS + END)  # two blocks, which are all, and an end
    assert shard_bytes(option(), 4, whole=False) == 18 * (BLOCKS + 2 * END) / 4 + gathered + LOGITS


def test_what_crosses_between_ranks_takes_its_bytes() -> None:
    """Within a node 200 bytes a nanosecond, between nodes 10."""
    weights = BLOCKS + 2 * END
    assert option().sync_ns(8, 1, NODES) == 6 * weights / 200
    assert option(2).sync_ns(8, 1, NODES) == 6 * (BLOCKS / 2 + 2 * END) / 10
    assert option().sync_ns(1, 1, NODES) == 0
    assert gathering_ns(option(), 8, NODES) == pytest.approx((2 + 2 + 4) * weights / 200)
    passed = option(network=replace(SMALL, frozen=True, input_gradient=True))
    assert gathering_ns(passed, 9, NODES) == pytest.approx((2 + 2) * weights / 10)
    assert gathering_ns(option(network=replace(SMALL, frozen=True)), 8, NODES) == pytest.approx(2 * weights / 200)
    assert gathering_ns(option(), 1, NODES) == 0
    problem = Problem((SMALL,), NODES, WORKLOAD)
    sent = 2 * 2 * 2 * (8 + 4 + 4 + 8)  # bytes of queries, keys, values and outputs, in two blocks, there and back
    assert exchange_ps(problem, option(), 2) == pytest.approx(1000 * sent / 2 / 200)
    assert exchange_ps(problem, option(), 16) == pytest.approx(1000 * sent * 15 / 16 / 10)


def test_peers_add_up_twice_in_a_block() -> None:
    """A ring of two sends half of the bytes twice: 16 bytes a row, at 200 a nanosecond, four times."""
    alone, two = option().cost, option(2).cost
    share = 1000 * SMALL.row_flops / (1000 * 2 * 0.76 * 4 / (4 + 256))
    assert two.linear_ps == pytest.approx(share + 4 * 80, abs=1)
    read = [-(-SMALL.row_flops // (2_039 * tp)) for tp in (1, 2)]  # as many bytes as operations of a row
    assert alone.microbatch_ns == 2 * 10_000 + read[0]
    assert two.microbatch_ns == 2 * 10_000 + read[1] + 4 * 15_000
    assert two.backward_percent == round(100 * (2 * share + 320) / (share + 320))


def test_blocks_keep_what_their_backward_needs() -> None:
    kept = 2 * (5 * 8 + 2 * 8 + 2 * 4 + 4 * 16)
    assert (option().unit_bytes, option().work_bytes) == (2 * kept, 0)
    assert (option(recompute=True).unit_bytes, option(recompute=True).work_bytes) == (2 * 2 * 8, kept)
    assert option(2).unit_bytes == 2 * 2 * (5 * 8 + (2 * 8 + 2 * 4 + 4 * 16) / 2)


def test_an_interaction_takes_features_of_all_and_products_of_a_share() -> None:
    problem = Problem((SMALL, SMALL), NODES, WORKLOAD)
    sent = 2 * 1024 * 2 * 64 * 2  # bytes of features of both towers, and as many back
    assert _interaction_ns(problem, 64, 16) == pytest.approx(sent / 10 + 6 * 64 * 64 * 1024 / (16 * 1000 * 0.3))
