"""Rows that take time between modules and stages: in the search, the bounds, and what is in flight."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from builders.jobs import job_data
from builders.samples import make_samples
from builders.transfers import (
    INTO,
    ONWARD,
    STAGES,
    alike_data,
    one_image_each,
    transfer,
    with_transfers,
    without_transfers,
)

from dataserver.planning.job.identity import Job, identify, parse_job
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.layouts.pipelined.placing import Placement, makespan_ns, placement_problem
from dataserver.planning.layouts.pipelined.timeline import timeline as pipelined_timeline
from dataserver.planning.planner import plan_step, timeline
from dataserver.planning.stream.samples import StepSamples, Task

FROZEN = (("vit",), ("llm",), ("vit", "llm"), ("dit",))


def small_job(
    dp: int,
    pp: int,
    slots: int,
    *,
    padded: bool = False,
    latency_only: bool = True,
    frozen: Sequence[str] = (),
    **layout: Any,
) -> Job:
    """Encoder, backbone and generator of equal degrees, so that a component has one rank of each; times divide."""
    data = job_data(
        encoder=dp,
        backbone=(dp, pp),
        generator=dp,
        stream={
            "seq_len": 900,
            "sizing": {"max_patches": 64},
            "global_batch": dp * slots,
            "packing": {"enabled": False},
            "generation": {"ratio": "0.5", "query_tokens": 16},
        },
        execution={"layout": {"kind": "pipelined", **layout}},
    )
    for module in data["execution"]["modules"]:
        module["cost"] = {"microbatch_ns": 600, "linear_ps": 6_000 * pp, "quadratic_fs": 0}
        module["frozen"] = module["name"] in frozen
    data["execution"]["modules"][1]["padded"] = padded
    rows = (0, 0, 0) if latency_only else (3, 7, 2)
    transfers = zip((INTO, STAGES, ONWARD) if pp > 1 else (INTO, ONWARD), (401, 302, 203), rows, strict=False)
    return with_transfers(data, *(transfer(pair, latency, "0.5", row) for pair, latency, row in transfers))


def placed(job: Job, samples: StepSamples, rank: tuple[int, ...], wave: tuple[int, ...]) -> tuple[int, int]:
    """Of the step with each sample, a sequence of its own, on that rank and in that microbatch: the makespan that the
    compiled search finds and that of the timeline, images on the rank of their sequence."""
    execution, waves = job.spec.execution, max(wave) + 1
    plan = plan_step(job, 0, samples)
    assert plan.num_microbatches == waves
    in_flight = np.concatenate([plan.in_flight(m.name) for m in execution.by_depth])
    problem = placement_problem(job.spec, in_flight, samples, np.arange(len(samples)), waves)
    places = np.array(rank), np.array(wave)
    placement = Placement(*places, np.zeros(len(samples), np.int64))
    found = dict(zip([a.module for a in plan.arrangements], plan.arrangements, strict=True))
    for name, arrangement in found.items():
        sample = samples.image_sample[arrangement.item] if name != "llm" else arrangement.item
        order = np.lexsort((arrangement.item, places[1][sample], places[0][sample]))
        item, sample = arrangement.item[order], sample[order]
        found[name] = replace(arrangement, item=item, rank=places[0][sample], microbatch=places[1][sample])
    routings = []
    for routing in plan.routings:
        image = found[next(m for m in (routing.source_module, routing.target_module) if m != "llm")]
        sample, patches = samples.image_sample[image.item], samples.patches[image.item]
        ends = {"rank": places[0][sample], "microbatch": places[1][sample]}
        rows = patches // 4 if routing.target_module == "llm" else np.full(len(sample), 16)
        moved = {f"{end}_{name}": values for end in ("source", "target") for name, values in ends.items()}
        starts = {f"{end}_start": np.zeros_like(rows) for end in ("source", "target")}
        routings.append(replace(routing, **moved, **starts, rows=rows))
    step = replace(plan, arrangements=tuple(found.values()), routings=tuple(routings))
    return makespan_ns(problem, placement), pipelined_timeline(job.spec, step).makespan_ns


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("dp", "pp"), [(1, 1), (1, 3), (2, 2)])
def test_the_search_counts_hops(dp: int, pp: int, schedule: str) -> None:
    """Where transfers depend on no rows and components are single ranks, its recurrence is the simulator."""
    job = small_job(dp, pp, 4, schedule=schedule)
    samples = make_samples(job, 4 * dp, 1, 2)
    rank = tuple(np.arange(4 * dp) % dp)
    wave = tuple(np.arange(4 * dp) // dp)
    searched, simulated = placed(job, samples, rank, wave)
    assert searched == simulated
    assert searched > placed(without_transfers(job), samples, rank, wave)[1]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("frozen", FROZEN, ids=" and ".join)
def test_the_search_counts_no_hops_of_gradients_that_are_not_sent(frozen: Sequence[str], schedule: str) -> None:
    job = small_job(1, 3, 4, schedule=schedule, frozen=frozen)
    samples = make_samples(job, 4, 1, 2)
    places = (0,) * 4, tuple(range(4))
    searched, simulated = placed(job, samples, *places)
    assert searched == simulated
    assert searched < placed(small_job(1, 3, 4, schedule=schedule), samples, *places)[1]


@pytest.mark.parametrize("frozen", FROZEN, ids=" and ".join)
def test_no_placement_with_frozen_modules_is_below_the_bound(frozen: Sequence[str]) -> None:
    job = small_job(1, 3, 4, latency_only=False, order="search", frozen=frozen)
    samples = make_samples(job, 4, 0, 1)
    times = [placed(job, samples, (0,) * 4, wave)[1] for wave in permutations(range(4))]
    plan = plan_step(job, 0, samples)
    bound = layout_of(job.spec.execution).lower_bound_ns(job, plan)
    assert layout_of(job.spec.execution).lower_bound_ns(without_transfers(job), plan) < bound <= min(times)
    assert timeline(job.spec, plan).makespan_ns <= min(times) * 1.06


@pytest.mark.parametrize(("row_bytes", "frozen"), [(48, False), (24, True)])
@pytest.mark.parametrize("others", [((16, 16), (10, 34)), ((12, 20), (16, 22))])
def test_a_backbone_rank_may_wait_for_the_smaller_images_of_a_sequence(
    row_bytes: int, frozen: bool, others: tuple[tuple[int, int], ...]
) -> None:
    """Three encoder ranks for two of the backbone: the slowest of them sends some other image than the largest one."""
    data = alike_data(2, 1, generates=False, kind="pipelined", order="search")
    data["stream"] |= {"seq_len": 4096, "sizing": {**data["stream"]["sizing"], "max_patches": 1024}}
    (encoder,) = (m for m in data["execution"]["modules"] if m["kind"] == "encoder")
    encoder |= {"dp": 3, "frozen": frozen}
    job = with_transfers(data, transfer(INTO, 0, "1", row_bytes))
    for last in ((10, 26), (14, 24)), ((14, 18), (10, 34)):
        grids = np.array([(20, 20), *others, (20, 20), *last], np.int32)
        samples = StepSamples(
            dataset=np.zeros(2, np.int32),
            epoch=np.zeros(2, np.int64),
            sample=np.arange(2, dtype=np.uint64),
            task=np.full(2, Task.UNDERSTANDING, np.int32),
            text_tokens=np.full(2, 1500),
            truncated_tokens=np.zeros(2, np.int64),
            tokens=np.full(2, 2000),
            image_offsets=np.array([0, 3, 6]),
            image_rows=grids[:, 0],
            image_columns=grids[:, 1],
        )
        plan = plan_step(job, 0, samples)
        assert layout_of(job.spec.execution).lower_bound_ns(job, plan) <= timeline(job.spec, plan).makespan_ns


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("dp", "pp", "padded"), [(1, 2, False), (2, 2, False), (1, 3, True)])
def test_no_placement_of_a_small_step_is_below_the_bound(dp: int, pp: int, padded: bool, seed: int) -> None:
    """All placements of four sequences, simulated with transfers by their rows; the plan is among the best."""
    job = small_job(dp, pp, 4 // dp, padded=padded, latency_only=False, order="search")
    samples = make_samples(job, 4, seed, 1)
    waves = 4 // dp
    all_places = (list(zip(*p, strict=True)) for p in permutations(product(range(dp), range(waves))))
    times = [placed(job, samples, rank, wave)[1] for rank, wave in all_places]
    plan = plan_step(job, 0, samples)
    planned, bound = timeline(job.spec, plan).makespan_ns, layout_of(job.spec.execution).lower_bound_ns(job, plan)
    assert bound <= min(times)
    assert bound > layout_of(job.spec.execution).lower_bound_ns(without_transfers(job), plan)
    assert planned <= min(times) * 1.02


@pytest.mark.parametrize(
    ("dp", "pp", "generates"), [(1, 1, False), (1, 1, True), (1, 3, False), (1, 3, True), (2, 2, False)]
)
def test_a_single_wave_takes_its_bound(dp: int, pp: int, generates: bool) -> None:
    """Nothing waits but for what the bound counts, so that it is exact but for rounding."""
    pairs = [ONWARD if generates else INTO, *([STAGES] if pp > 1 else [])]
    transfers = [transfer(pair, 1_000 * (k + 1), "0.5", 3 + k) for k, pair in enumerate(pairs)]
    job = with_transfers(alike_data(dp, pp, generates=generates, kind="pipelined"), *transfers)
    plan = plan_step(job, 0, one_image_each(job, dp))
    bound_of, makespan = layout_of(job.spec.execution).lower_bound_ns, timeline(job.spec, plan).makespan_ns
    assert makespan - 1 <= bound_of(job, plan) <= makespan
    assert makespan > timeline(without_transfers(job).spec, plan).makespan_ns


def makespans(job: Job, samples: StepSamples, dimension: str) -> dict[str, int]:
    """Of the alternatives of one dimension, which all have the job's transfers."""
    found = {}
    for choice in layout_of(job.spec.execution).alternatives(job).single:
        for name, edit in choice.choices.items() if choice.name == dimension else ():
            other = identify(job.spec.model_copy(update={"execution": edit(job.spec.execution)}))
            assert other.spec.execution.transfers == job.spec.execution.transfers
            found[name] = timeline(other.spec, plan_step(other, 0, samples)).makespan_ns
    return found


def test_what_is_in_flight_pays_where_hops_are_long() -> None:
    """Equal microbatches on four stages: with transfers, stages of strict 1F1B wait for each other."""
    data = alike_data(1, 4, generates=False, kind="pipelined")
    data["stream"]["global_batch"] = 12
    gains = []
    for transfers in ([], [transfer(STAGES, 20_000)]):
        job = with_transfers(data, *transfers) if transfers else parse_job(data)
        found = makespans(job, one_image_each(job, 12), "extra_in_flight")
        gains.append(found["0"] / found["4"])
    assert gains[0] == 1
    assert gains[1] > 1.1
