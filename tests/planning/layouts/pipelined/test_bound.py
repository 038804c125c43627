"""No plan is below the bound: all placements of small steps are tried, and every way to deal their images out."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, permutations, product
from random import Random

import numpy as np
import pytest
from builders.jobs import TWO_DATASETS, job_data
from builders.samples import make_samples, mixed_samples, texts

from dataserver.planning import I64
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.layouts.pipelined.placing import placement_problem
from dataserver.planning.layouts.pipelined.placing.bounds import work_bound_ns
from dataserver.planning.layouts.pipelined.timeline import timeline
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.samples import StepSamples

MOST = 300
"""Plans that are tried of a step; those that have more are left out."""


def drawn(seed: int) -> tuple[Job, StepSamples]:
    """Modules of up to two ranks and four stages, up to four sequences; some have one that is much longer."""
    draw = Random(seed)
    encoder, ranks, generator = draw.choice([0, 1, 2]), draw.choice([1, 1, 2]), draw.choice([0, 0, 1])
    waves = draw.choice([1, 2]) if ranks == 2 else draw.choice([1, 2, 3, 4])
    pp = draw.choice([1, 2, 4])
    layout = {"kind": "pipelined", "order": "none", "schedule": draw.choice(["1f1b", "gpipe"])}
    if pp > 1 and waves % pp == 0 and draw.random() < 0.3:
        layout |= {"schedule": "interleaved", "chunks": 2}
    data = job_data(
        encoder=encoder, backbone=(ranks, pp), generator=generator,
        stream={
            "seq_len": 900, "sizing": {"max_patches": 256}, "global_batch": ranks * waves,
            "packing": {"enabled": False},
            "generation": {"ratio": "1" if generator and not encoder else "0.5" if generator else "0",
                           "query_tokens": 16},
        },
        execution={"layout": layout},
    )  # fmt: skip
    for module in data["execution"]["modules"]:
        module["cost"] = {"microbatch_ns": draw.choice([0, 900, 9_000]), "linear_ps": draw.choice([3_000, 60_000]),
                          "quadratic_fs": draw.choice([0, 400_000])}  # fmt: skip
        module["frozen"] = draw.random() < 0.15
    if all(module["frozen"] for module in data["execution"]["modules"]):
        data["execution"]["modules"][0]["frozen"] = False
    job = parse_job(data)
    return job, make_samples(job, draw.randint(1, ranks * waves), seed, 2)


def plans(job: Job, plan: StepPlan) -> Iterator[StepPlan]:
    """All plans of the same sequences, with the schedules of a plan; those that differ in the names of ranks once."""
    samples, backbone = plan.samples, job.spec.execution.backbone
    images = [a for a in plan.arrangements if a.module != backbone.name]
    ranks = [job.spec.execution.module(a.module).dp for a in images for _ in a.item]
    slots = list(product(range(backbone.dp), range(plan.num_microbatches)))
    for chosen in permutations(slots, len(samples)):
        if chosen and chosen[0][0]:
            continue  # the first sequence is on the first rank
        for dealt in product(*map(range, ranks)):
            yield arranged(job, plan, np.array(chosen, np.int64).reshape(-1, 2), np.array(dealt, np.int64))


def arranged(job: Job, plan: StepPlan, places: I64, dealt: I64) -> StepPlan:
    """Each sample on that rank in that microbatch, and each image of all modules on that rank of its module."""
    samples, name, found, routed, at = plan.samples, job.spec.execution.backbone.name, [], [], 0
    for arrangement in plan.arrangements:
        item = np.sort(arrangement.item)
        sample = item if arrangement.module == name else samples.image_sample[item]
        rank = places[item, 0] if arrangement.module == name else dealt[at : at + len(item)]
        at += 0 if arrangement.module == name else len(item)
        order = np.lexsort((item, places[sample, 1], rank))
        fields = {"item": item[order], "rank": rank[order], "microbatch": places[sample, 1][order]}
        found.append(replace(arrangement, **fields))
    for routing in plan.routings:
        image = next(
            a for a in found if a.module in (routing.source_module, routing.target_module) and a.module != name
        )
        sample, patches = samples.image_sample[image.item], samples.patches[image.item]
        ends = {image.module: image.rank, name: places[sample, 0]}
        rows = patches // 4 if routing.target_module == name else np.full(len(sample), 16)
        moved = {f"{end}_rank": ends[getattr(routing, f"{end}_module")] for end in ("source", "target")}
        moved |= {f"{end}_microbatch": places[sample, 1] for end in ("source", "target")}
        moved |= {f"{end}_start": np.zeros_like(rows) for end in ("source", "target")}
        routed.append(replace(routing, **moved, rows=rows))
    return replace(plan, arrangements=tuple(found), routings=tuple(routed))


def checked(seed: int) -> bool | None:
    """Whether the longest way raises the bound of a pipeline, which no plan is below; None if it has too many plans."""
    job, samples = drawn(seed)
    execution, plan = job.spec.execution, plan_step(job, 0, samples)
    tried = list(islice(plans(job, plan), MOST + 1))
    if len(tried) > MOST:
        return None
    bound = layout_of(execution).lower_bound_ns(job, plan)
    least = min(timeline(job.spec, one).makespan_ns for one in tried)
    assert bound <= timeline(job.spec, plan).makespan_ns
    assert bound <= least, seed
    in_flight = np.concatenate([plan.in_flight(m.name) for m in execution.by_depth])
    problem = placement_problem(job.spec, in_flight, samples, np.arange(len(samples)), plan.num_microbatches)
    return bound > work_bound_ns(problem)


def check(number: int, first: int) -> None:
    """So many pipelines; the way of a sequence counts in some of them."""
    raised = (checked(seed) for seed in range(first, first + 3 * number))
    found = list(islice((r for r in raised if r is not None), number))
    assert len(found) == number
    assert sum(found) > number // 10


def test_no_plan_is_below_the_bound() -> None:
    check(100, 0)


@pytest.mark.long
def test_no_plan_of_2000_pipelines_is_below_the_bound() -> None:
    check(2_000, 10_000)


def test_a_giant_counts_with_its_way_through_all_stages() -> None:
    """One of four unpacked sequences takes nearly all work, and passes eight stages: the bound is nearly the step."""
    data = job_data(
        encoder=0, backbone=(1, 8), stream={"seq_len": 4096, "packing": {"enabled": False}, "global_batch": 4}
    )
    data["execution"]["modules"][0]["cost"] = {"microbatch_ns": 0, "linear_ps": 8_000_000, "quadratic_fs": 0}
    job = parse_job(data)
    samples = texts(np.array([4000, 40, 50, 60], np.int64))
    plan = plan_step(job, 0, samples)
    step, bound = timeline(job.spec, plan).makespan_ns, layout_of(job.spec.execution).lower_bound_ns(job, plan)
    assert bound <= step <= bound * 101 // 100


def test_generators_of_one_sequence_return_gradients_each_by_itself() -> None:
    """One is slow forward, the other backward: their times overlap, so that the longer sum counts."""
    pairs = {"datasets": TWO_DATASETS, "seq_len": 900, "sizing": {"max_patches": 256}, "generation": {"ratio": "1"}}
    fewest = {"layout": {"kind": "pipelined", "fewest_microbatches": True}}
    data = job_data(encoder=0, generator=1, stream=pairs, execution=fewest)
    llm, dit = data["execution"]["modules"]
    cost = {"microbatch_ns": 0, "quadratic_fs": 0}
    llm["cost"] = cost | {"linear_ps": 1_000}
    slow_forward = dit | {"cost": cost | {"linear_ps": 1_000_000, "backward_percent": 50}}
    slow_backward = {"name": "dit-x", "datasets": ["x"], "cost": cost | {"linear_ps": 200_000, "backward_percent": 400}}
    data["execution"]["modules"] = [llm, slow_forward, dit | slow_backward]
    job = parse_job(data)
    samples = mixed_samples(job, 2, seed=2)
    plan = plan_step(job, 0, samples)
    assert (plan.num_microbatches, len(samples.patches)) == (1, 2)
    assert layout_of(job.spec.execution).lower_bound_ns(job, plan) == timeline(job.spec, plan).makespan_ns
