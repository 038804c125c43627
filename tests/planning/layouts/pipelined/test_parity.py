"""Modality parity: in every wave all ranks of the backbone have images, or none has."""

import numpy as np
import pytest
from builders.jobs import job_data
from builders.pipelined import Step, largest, with_memory
from builders.samples import make_samples
from builders.whole_ranks import samples_with_images, waves_by_ranks, whole_steps, without
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.kernels.interpreted import interpreted

from dataserver.planning import I64, Bool
from dataserver.planning.job.fields import BalancePolicy
from dataserver.planning.job.identity import parse_job
from dataserver.planning.layouts.pipelined.parity_packing import even_images
from dataserver.planning.layouts.pipelined.placing import (
    Placement,
    PlacementProblem,
    balanced,
    fitted,
    placement_problem,
    with_parity,
)
from dataserver.planning.layouts.pipelined.placing.parity import _needs_images
from dataserver.planning.plan.placement import in_slots
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.plan.views import view_plan
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.sizing import SampleTooLargeError, shard_table, size_samples


def check_said(step: Step, plan: StepPlan) -> list[int]:
    """The waves without parity, which plan and views name."""
    job, _ = step
    ranks, dp = waves_by_ranks(job, plan), job.spec.execution.backbone.dp
    broken = [wave for wave, count in enumerate(ranks) if 0 < count < dp]
    said = plan.decisions[-1]
    assert said.chosen.startswith(f"images on some ranks only in {len(broken)} of" if broken else "images on all ranks")
    for module in job.spec.execution.modules:
        for wave in range(plan.num_microbatches):
            view = view_plan(job.spec, plan, module.name, module.dp - 1, wave)
            assert view.images_on_some_ranks is (wave in broken)
    return broken


def check_same_samples(step: Step, plan: StepPlan) -> None:
    job, samples = step
    encoder, backbone = (plan.arrangement(m.name) for m in job.spec.execution.modules)
    assert sorted(backbone.item.tolist()) == list(range(len(samples)))
    assert sorted(encoder.item.tolist()) == list(range(len(samples.image_rows)))


@settings(max_examples=60, deadline=None)
@given(whole_steps(parity=True))
def test_every_wave_has_parity_but_for_what_is_left_over(step: Step) -> None:
    job, samples = step
    plan = plan_step(job, 3, samples)
    broken = check_said(step, plan)
    check_same_samples(step, plan)
    assert len(broken) <= 1
    if not job.stream.packing.enabled:
        images, dp = sum(samples_with_images(samples)), job.spec.execution.backbone.dp
        whole = images % dp == 0 if job.spec.execution.microbatch == 1 else images == 0 or images >= dp
        assert bool(broken) is not whole


@settings(max_examples=40, deadline=None)
@given(whole_steps(parity=True), st.data())
def test_whatever_memory_holds_without_parity_is_planned_with_it(step: Step, data: st.DataObject) -> None:
    job, samples = step
    units = {name: data.draw(st.integers(size, 3 * size)) for name, size in largest(job, samples).items()}
    job = with_memory(job, units)
    try:
        other = plan_step(without(job, "modality_parity"), 3, samples)
    except SampleTooLargeError:
        with pytest.raises(SampleTooLargeError):
            plan_step(job, 3, samples)
        return
    plan = plan_step(job, 3, samples)
    check_said((job, samples), plan)
    check_same_samples((job, samples), plan)
    assert sorted(other.samples.sample.tolist()) == sorted(plan.samples.sample.tolist())


@settings(max_examples=60, deadline=None)
@given(whole_steps(parity=True), st.data())
def test_making_room_keeps_parity(step: Step, data: st.DataObject) -> None:
    job, samples = step
    job = with_memory(job, {name: data.draw(st.integers(n, 2 * n)) for name, n in largest(job, samples).items()})
    execution, each = job.spec.execution, np.arange(len(samples))
    waves = 2 + len(samples) // (execution.backbone.dp * execution.microbatch)
    held = np.ones(sum(m.pp for m in execution.modules), np.int64)
    problem = placement_problem(job.spec, held, samples, each, waves, parity=True)
    placement = with_parity(problem, balanced(problem, BalancePolicy.NONE))
    found, _ = fitted(problem, placement)
    has = np.append(samples_with_images(samples), False)
    before, after = (has[in_slots(problem.shape, p)].any(axis=2).tolist() for p in (placement, found))
    assert before == after


def test_sequences_stay_on_their_ranks_where_these_have_others_to_exchange() -> None:
    """Two ranks have images in the first wave and two in the second, where the costlier one meets a cheap text."""
    images, costs = np.array([1, 0, 1, 0, 0, 1, 0, 1, 0]), np.array([9, 9, 9, 9, 50, 10, 1, 20, 0])
    problem = PlacementProblem(
        dp=4,
        num_waves=2,
        slots=1,
        components=4,
        num_stages=1,
        num_encoders=0,
        in_flight=np.ones(1, np.int64),
        own=costs[None],
        way=costs[None, :-1],
        base=np.zeros(1, np.int64),
        percent=np.full(1, 200),
        chunks=1,
        images=images,
    )
    rank, wave = np.divmod(np.arange(8), 2)
    found = with_parity(problem, Placement(rank, wave, np.zeros(8, np.int64)))
    assert found.rank.tolist() == rank.tolist()
    assert found.wave.tolist() == [0, 1, 0, 1, 1, 0, 1, 0]


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_packed_steps_of_a_mixture_have_parity(dp: int) -> None:
    """Half of the samples have images; sequences hold several."""
    data = job_data(
        stream={"seq_len": 900, "global_batch": 8 * dp, "sizing": {"max_patches": 256}},
        execution={"modality_parity": True, "identity_routing": True, "layout": {"kind": "pipelined", "order": "none"}},
        encoder=dp,
        backbone=(dp, 1),
    )
    job, given = parse_job(data), 0
    for seed in range(6):
        samples = make_samples(job, 20 * dp + seed, seed, 1)
        assert not check_said((job, samples), plan := plan_step(job, seed, samples))
        other = plan_step(without(job, "modality_parity"), seed, samples)
        given += any(0 < count < dp for count in waves_by_ranks(job, other))
        assert plan.num_microbatches == other.num_microbatches
    assert given > 2, "it does not come by itself"


def test_a_step_of_few_texts_takes_a_microbatch_more() -> None:
    """A text that fills a sequence leaves seven with images for four ranks: one of their samples gets an eighth."""
    data = job_data(
        stream={"seq_len": 512, "global_batch": 8, "sizing": {"max_patches": 256}},
        execution={"modality_parity": True},
        backbone=(4, 1),
    )
    job = parse_job(data)
    side = np.full(14, 112, np.int32)
    offsets, lengths = np.minimum(np.arange(16), 14), np.append(np.full(14, 200), 600)
    table = shard_table(job.stream, np.arange(15), lengths, offsets, side, side)
    samples = size_samples(job.stream, 0, 0, np.arange(15).astype(np.uint64), table)
    plan = plan_step(job, 0, samples)
    assert not check_said((job, samples), plan)
    assert sorted(waves_by_ranks(job, plan)) == [0, 4, 4]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 3), st.integers(1, 30))
def test_even_images_moves_samples_alone(seed: int, dp: int, slots: int, count: int) -> None:
    random = np.random.default_rng(seed)
    tokens, has = random.integers(1, 60, count), random.random(count) < random.random()
    capacity, before = 100, np.arange(count)
    for _ in range(count):  # any packing that fits
        sample, other = random.integers(0, count, 2)
        moved = np.where(np.arange(count) == sample, before[other], before)
        before = moved if np.bincount(moved, tokens).max() <= capacity else before
    before = np.unique(before, return_inverse=True)[1]
    most = int(before.max()) + 1 + int(random.integers(0, 3))
    found = even_images(before, tokens, has, capacity, dp, slots, most)
    if found is None:
        assert not spreads(before, has, dp, slots, most)
        return
    assert np.bincount(found, tokens).max() <= capacity
    assert int(found.max()) < most
    assert len(np.unique(found)) == int(found.max()) + 1
    images = len(np.unique(found[has]))
    assert images % dp == 0 if slots == 1 else images in (0, *range(dp, count + 1))


def spreads(sequence: I64, has: Bool, dp: int, slots: int, most: int) -> bool:
    """Whether samples with images, each in a new sequence, would do: then a way must be found."""
    images = len(np.unique(sequence[has]))
    shortfall = -images % dp if slots == 1 else max(0, dp - images)
    return images + shortfall <= int(has.sum()) and int(sequence.max()) + 1 + shortfall <= most


@pytest.mark.parametrize(
    ("before", "has", "after"),
    [
        ([0, 0, 1, 1, 2, 2], [0, 2, 4], [0, 1, 2, 2, 0, 1]),  # that of 10 tokens and a text of 12 change places
        ([0, 0, 0, 1, 1, 2], [0, 2], [0, 1, 1, 1, 0, 2]),  # of two in a sequence that of 30 and a text of 29 do
        ([0, 1, 2, 1, 3, 1], [0, 2, 4], [0, 1, 2, 1, 0, 1]),  # alone, that of 10 tokens joins another, and no text
        ([0, 0, 0, 0, 0, 0], [0, 2], [0, 0, 1, 0, 0, 0]),  # without other sequences it gets one of its own
        ([0, 0, 0, 0, 0, 0], [0], None),  # a single one cannot be shared
    ],
)
def test_a_sequence_less_or_more_has_images(before: list[int], has: list[int], after: list[int] | None) -> None:
    tokens, images = np.array([30, 12, 31, 29, 10, 10]), np.isin(np.arange(6), has)
    found = even_images(np.array(before), tokens, images, 130, 2, 1, 4)
    assert (found if found is None else found.tolist()) == after


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_what_the_search_may_do_by_definition(seed: int, width: int) -> None:
    """Exchanges and moves are allowed where no microbatch gets its first images or gives its last ones."""
    components, random = interpreted("kernels.components"), np.random.default_rng(seed)
    images = np.append(random.integers(0, 2, 12), 0)
    at = random.permutation(np.append(np.arange(12), np.full(3 * 4 * width, -1)))[: 3 * 4 * width].reshape(3, 4, width)
    slots = type("Slots", (), {"at": at})
    costs = type("Costs", (), {"images": images})

    def held() -> list[list[bool]]:
        return [[bool(images[m].any()) for m in rank] for rank in at]

    before, place = held(), (*random.integers(0, [3, 4, width]).tolist(), *random.integers(0, [3, 4, width]).tolist())
    a, b = place[:3], place[3:]
    if a[:2] != b[:2]:
        allowed = components.exchange_keeps_parity(slots, costs, *place)
        at[a], at[b] = at[b], at[a]
        assert allowed is (held() == before)
        at[a], at[b] = at[b], at[a]
    rank, first, second, shift = a[0], a[1], b[1], bool(random.integers(0, 2))
    if first != second:
        allowed = components.move_keeps_parity(slots, costs, rank, first, second, shift)
        order = list(range(4))
        if shift:
            order.insert(second, order.pop(first))
        else:
            order[first], order[second] = order[second], order[first]
        kinds = [before[rank][wave] for wave in order]
        assert not allowed or kinds == before[rank]
        assert allowed or (not shift and kinds != before[rank]) or len({*before[rank]}) == 2


def test_fewer_sequences_with_images_than_ranks_share_one_wave() -> None:
    held = np.array([[0, 0], [0, 1], [0, 0]])
    assert _needs_images(held, 4).tolist() == [[False, False], [False, True], [False, False]]
