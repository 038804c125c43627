"""Contrastive groups, memory formulas, and the choice of replicas for towers."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from builders.contrastive import batch_sync_operations, distmm_operations
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_rows.distmm_memory import distmm_max_batch, pipeline_max_microbatch

from dataserver.planning.balancing import BALANCERS, BinBudget, bin_loads, in_runs
from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.layouts.contrastive.batches import (
    BatchedArrangement,
    balance_batches,
    batches_in_order,
    contrastive_batches,
    pad_batches,
)
from dataserver.planning.layouts.contrastive.choice import (
    TowerChoice,
    TowerCluster,
    TowerDegree,
    TowerPlacement,
    TowerProfile,
    choose_towers,
    devices_in_parallel,
    devices_shared_equally,
    share_time,
)
from dataserver.planning.layouts.contrastive.options import ContrastiveSchedule
from dataserver.planning.layouts.contrastive.profiles import tower_profile, with_degrees
from dataserver.planning.layouts.contrastive.programs import tower_in_flight, with_interactions
from dataserver.planning.layouts.contrastive.timeline import TowerTimes, contrastive_pipeline
from dataserver.planning.simulation import simulate, stage_operations


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.sampled_from(sorted(BALANCERS)),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_no_sample_leaves_its_batch(
    groups: int, ranks: int, microbatches: int, samples: int, balancer: str, seed: int
) -> None:
    """Every group keeps its samples, spread evenly over its own microbatches of all ranks; whatever balances them."""
    random = np.random.default_rng(seed)
    batch = ranks * microbatches * samples
    group = random.permutation(contrastive_batches(groups * batch, batch))
    loads = random.integers(0, 1_000, len(group))
    found = balance_batches(loads, group, ranks, microbatches, BALANCERS[balancer])
    assert np.array_equal(found.microbatch // microbatches, group)
    cells, counts = np.unique(np.stack([found.rank, found.microbatch]), axis=1, return_counts=True)
    assert cells.shape[1] == ranks * microbatches * groups
    assert set(counts.tolist()) == {samples}


def test_batches_are_balanced_inside() -> None:
    random = np.random.default_rng(0)
    loads, group = random.lognormal(10, 1, 4 * 512).astype(np.int64), contrastive_batches(4 * 512, 512)
    found = balance_batches(loads, group, num_ranks=8, microbatches_per_batch=4)
    for number in range(4):
        mine = group == number
        heaviest = bin_loads(loads[mine], found.rank[mine], 8).max()
        assert heaviest <= 1.001 * loads[mine].sum() / 8
        assert heaviest < bin_loads(loads[mine], in_runs(512, 8), 8).max()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_padded_groups(groups: int, ranks: int, microbatches: int, samples: int, seed: int) -> None:
    """Equal counts inside every group, and no other arrangement of equal counts pads less."""
    random = np.random.default_rng(seed)
    batch = ranks * microbatches * samples
    group = random.permutation(contrastive_batches(groups * batch, batch))
    loads = random.integers(0, 1_000, len(group))

    def padded_total(found: BatchedArrangement) -> int:
        cells = found.rank * groups * microbatches + found.microbatch
        longest = np.zeros(ranks * groups * microbatches, np.int64)
        np.maximum.at(longest, cells, loads)
        assert np.bincount(cells, minlength=len(longest)).tolist() == [samples] * len(longest)
        assert np.array_equal(found.microbatch // microbatches, group)
        return int(longest.sum())

    least = padded_total(pad_batches(loads, group, ranks, microbatches))
    assert least <= padded_total(batches_in_order(loads, group, ranks, microbatches))
    assert least <= padded_total(balance_batches(loads, group, ranks, microbatches))


def test_batches_in_order_are_runs() -> None:
    group = contrastive_batches(12, 6)
    found = batches_in_order(np.ones(12, np.int64), group, 3, 2)
    assert found.rank.tolist() == [0, 0, 1, 1, 2, 2] * 2
    assert found.microbatch.tolist() == [0, 1] * 3 + [2, 3] * 3


def test_memory_of_groups() -> None:
    """Loads that say nothing of needs: without memory the two needy items share a rank."""
    loads, need, group = np.array([8, 7, 6, 7]), np.array([5, 1, 5, 1]), np.zeros(4, np.int64)
    assert bin_loads(need, balance_batches(loads, group, 2, 1, BALANCERS["lpt"]).rank, 2).tolist() != [6, 6]
    found = balance_batches(loads, group, 2, 1, BALANCERS["lpt"], BinBudget(need, 6))
    assert bin_loads(need, found.rank, 2).tolist() == [6, 6]
    with pytest.raises(ValueError, match="memory"):
        balance_batches(loads, group, 2, 1, BALANCERS["lpt"], BinBudget(need, 5))


def test_microbatches_in_flight() -> None:
    """DISTMM-Pipe runs ahead as 1F1B does, on all stages but the last; batch-sync holds one group."""
    assert tower_in_flight(4, 5, ContrastiveSchedule.BATCH_SYNC, 3).tolist() == [5, 5, 5, 5]
    assert tower_in_flight(4, 5, ContrastiveSchedule.DISTMM_PIPE).tolist() == [8, 7, 6, 5]
    assert tower_in_flight(4, 5, ContrastiveSchedule.DISTMM_PIPE, 2).tolist() == [10, 9, 8, 5]
    assert tower_in_flight(1, 5, ContrastiveSchedule.DISTMM_PIPE, 2).tolist() == [5]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(0, 6), min_size=4, max_size=4))
def test_any_depth_above_a_group_finishes(stages: int, size: int, groups: int, more: list[int]) -> None:
    """Depths that never rise, down to one group on every stage: no list waits for another, and no more is held."""
    held = size + np.sort(np.array(more[:stages]))[::-1]
    held[-1] = size
    times = np.ones((2, stages, size * groups), np.int64)
    none = np.zeros_like(times)
    towers = [
        TowerTimes(times, 2 * times, times, none[:, 0]),
        TowerTimes(times[:1, :1], times[:1, :1], none[:1, :1], none[:1, 0]),
    ]
    operations = [stage_operations(n, size * groups) for n in (*held.tolist(), size)]
    for last in (stages - 1, stages):
        operations[last] = with_interactions(operations[last], size)
    found = simulate(contrastive_pipeline(towers, np.full(groups, 3), operations))
    assert found.makespan_ns >= 3 * size * groups + 3 * groups
    expected = np.tile(np.minimum(held, size * groups), 2)
    assert (found.peak_bytes <= np.append(expected, 0)).all()


def test_items_that_make_up_no_whole_batches() -> None:
    with pytest.raises(ValueError, match="10 items do not divide into contrastive batches of 4"):
        contrastive_batches(10, 4)


@given(st.integers(1, 1_000), st.integers(0, 1_000), st.integers(1, 50), st.integers(1, 64))
def test_memory_formulas(memory: int, states: int, activations: int, stages: int) -> None:
    """Check 18, against what the schedules hold: P microbatches on P stages, and two groups of DISTMM-Pipe."""
    if memory * stages <= states:
        with pytest.raises(ValueError, match="fill the memory"):
            pipeline_max_microbatch(memory, states, activations, stages)
        return
    share = Fraction(states, stages)
    plain = pipeline_max_microbatch(memory, states, activations, stages)
    assert plain == (memory - share) / Fraction(activations, stages) / stages
    assert share + stages * plain * Fraction(activations, stages) == memory
    batch = distmm_max_batch(memory, states, activations, stages)
    assert batch == Fraction(memory * stages - states, 2 * activations)
    assert share + 2 * batch * Fraction(activations, stages) == memory
    more = distmm_max_batch(memory, states, activations, stages + 1)
    assert more - batch == Fraction(memory, 2 * activations)  # linear in the stages


def test_memory_formulas_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="0 stages"):
        distmm_max_batch(1, 0, 1, 0)
    with pytest.raises(ValueError, match="activations of 0"):
        pipeline_max_microbatch(1, 0, 0, 1)


def every_choice(tower: TowerProfile, cluster: TowerCluster, batch: int) -> list[TowerChoice]:
    found = []
    for d, replicas in product(tower.degrees, range(1, cluster.num_devices + 1)):
        if cluster.devices_per_node % d.tp or batch % replicas or d.tp * replicas > cluster.num_devices:
            continue
        b = batch // replicas
        time, memory = d.fixed_ns + b * d.sample_ps // 1_000, d.state_bytes + b * d.sample_bytes
        found.append(TowerChoice(tower.name, d.tp, replicas, b, time, memory))
    return [c for c in found if c.device_bytes <= cluster.device_bytes]


@st.composite
def tower_problems(draw: st.DrawFn) -> tuple[list[TowerProfile], TowerCluster, int]:
    def tower(name: str) -> TowerProfile:
        numbers = st.integers(0, 30)
        return TowerProfile(
            name,
            tuple(
                TowerDegree(tp, draw(numbers), 1_000 * draw(numbers), draw(numbers), draw(st.integers(0, 5)))
                for tp in draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3, unique=True))
            ),
        )

    towers = [tower(f"tower{i}") for i in range(draw(st.integers(1, 3)))]
    return towers, TowerCluster(draw(st.integers(1, 8)), 4, draw(st.integers(1, 90))), draw(st.sampled_from([4, 6, 8]))


@settings(max_examples=300, deadline=None)
@given(tower_problems())
def test_towers_equal_trying_everything(problem: tuple[list[TowerProfile], TowerCluster, int]) -> None:
    towers, cluster, batch = problem
    plans = list(product(*(every_choice(t, cluster, batch) for t in towers)))
    parallel = [max(c.step_ns for c in p) for p in plans if sum(c.devices for c in p) <= cluster.num_devices]
    shared = [sum(c.step_ns for c in p) for p in plans if sum(c.device_bytes for c in p) <= cluster.device_bytes]
    same = [p for p in plans if len({(c.tp, c.replicas) for c in p}) == 1]
    equal = [max(c.step_ns for c in p) for p in same if sum(c.devices for c in p) <= cluster.num_devices]
    ways = (
        (devices_in_parallel, parallel),
        (share_time, shared),
        (devices_shared_equally, equal),
        (choose_towers, parallel + shared),
    )
    for place, times in ways:
        if not times:
            with pytest.raises(ValueError, match=r"devices|bytes"):
                place(towers, cluster, batch)
            continue
        plan = place(towers, cluster, batch)
        assert plan.step_ns == min(times)
        assert plan.towers in plans
        used = [c.step_ns for c in plan.towers]
        if plan.placement is TowerPlacement.PARALLEL:
            assert plan.step_ns == max(used)
            assert sum(c.devices for c in plan.towers) <= cluster.num_devices
        else:
            assert plan.step_ns == sum(used)
            assert sum(c.device_bytes for c in plan.towers) <= cluster.device_bytes


def test_replicas_divide_into_microbatches() -> None:
    tower = TowerProfile("image", (TowerDegree(1, 0, 1_000_000, 0, 1),))
    found = {m: devices_in_parallel([tower], TowerCluster(8, 8, 60), 24, m).towers[0] for m in (1, 4, 24)}
    assert {m: (choice.replicas, choice.batch) for m, choice in found.items()} == {1: (8, 3), 4: (6, 4), 24: (1, 24)}


def test_a_tower_at_other_degrees() -> None:
    """Work, states and activations are divided; the constant is not, and comes with every microbatch."""
    cost = {"microbatch_ns": 1_000, "linear_ps": 2_000_000, "quadratic_fs": 5_000_000, "backward_percent": 150}
    tower = ModuleSpec(
        name="image",
        kind="tower",
        modality="image",
        dp=3,
        tp=2,
        pp=4,
        cost=cost,
        memory={"budget_bytes": 90, "unit_bytes": 3},
    )
    sizes = np.array([4, 6, 10, 20])
    profile = tower_profile(
        tower, sizes, batch=2, microbatches=3, state_bytes=1_001, cluster=TowerCluster(8, 4, 10_000)
    )
    assert [d.tp for d in profile.degrees] == [1, 2, 4]
    forward = sum(n * 2_000 + n * n * 5 for n in (4, 6, 10, 20))
    for degree in profile.degrees:
        assert degree.fixed_ns == 3 * 2_500
        assert degree.sample_ps == -(-2 * 2_500 * forward // (4 * degree.tp))
        assert degree.state_bytes == -(-1_001 // degree.tp)
        assert degree.sample_bytes == -(-2 * 3 * 30 // (2 * degree.tp))  # of the second batch, the fullest
    alone = with_degrees(tower, tp=1, replicas=5, free_bytes=77)
    assert (alone.dp, alone.tp, alone.pp, alone.sp) == (5, 1, 1, 1)
    assert alone.cost.model_dump() == {**cost, "linear_ps": 4_000_000, "quadratic_fs": 10_000_000, "window": None}
    assert alone.memory is not None
    assert (alone.memory.budget_bytes, alone.memory.unit_bytes) == (77, 6)
    same = tower_profile(alone, sizes, 2, 3, 1_001, TowerCluster(8, 4, 10_000))
    assert same == profile


def test_a_light_tower_gets_fewer_replicas() -> None:
    """The example of DISTMM: a heavy image tower with tensor parallelism, a light text tower beside it."""
    image = TowerProfile("image", (TowerDegree(1, 0, 9_000_000, 50, 4), TowerDegree(4, 0, 2_500_000, 15, 1)))
    text = TowerProfile("text", (TowerDegree(1, 1_000, 1_000_000, 5, 1),))
    plan = devices_in_parallel([image, text], TowerCluster(32, 8, 60), batch=96)
    heavy, light = plan.towers
    assert (heavy.tp, heavy.replicas, heavy.batch) == (4, 6, 16)
    assert (light.replicas, light.batch) == (3, 32)
    assert plan.step_ns == max(heavy.step_ns, light.step_ns) == 40_000


def test_towers_that_do_not_fit_are_named() -> None:
    towers = [
        TowerProfile("image", (TowerDegree(1, 1, 1, 70, 1),)),
        TowerProfile("text", (TowerDegree(1, 1, 1, 70, 1),)),
    ]
    with pytest.raises(ValueError, match=r"tower image fits no device.*at least 71 bytes of the 60"):
        choose_towers(towers, TowerCluster(8, 8, 60), 8)
    with pytest.raises(ValueError, match=r"need at least .* devices of their own.*together need more than 100 bytes"):
        choose_towers(towers, TowerCluster(1, 8, 100), 8)
    with pytest.raises(ValueError, match=r"need at least \[1, 1\] devices of their own"):  # whatever memory it had
        devices_in_parallel(towers, TowerCluster(1, 8, 60), 8)


def test_the_light_tower_waits_at_the_barrier_less_with_distmm_pipe() -> None:
    def times(ranks: int, stages: int, forward: int) -> TowerTimes:
        spent = np.full((ranks, stages, 16), forward)
        return TowerTimes(spent, 2 * spent, np.zeros_like(spent), np.zeros((ranks, 16), np.int64))

    towers, interaction = [times(2, 3, 30), times(1, 2, 20)], np.full(4, 15)
    sync, pipe = (
        simulate(contrastive_pipeline(towers, interaction, [made(s, n, 4, 4) for n in (3, 2) for s in range(n)]))
        for made in (batch_sync_operations, distmm_operations)
    )
    assert sync.makespan_ns == 4 * ((4 + 3 - 1) * 90 + 15)
    assert pipe.makespan_ns < sync.makespan_ns
    assert pipe.makespan_ns >= 16 * 90 + 4 * 15  # the last stage of the heavy tower does all this
