"""Pipelined jobs of any policy with the samples of a step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from builders.jobs import BALANCES, TWO_DATASETS, job_data, make_job
from builders.samples import make_samples, make_table, mixed_samples
from hypothesis import strategies as st

from dataserver.planning.job.fields import BalancePolicy, ModuleKind, OrderPolicy, PackingPolicy
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.layouts.shared.waves import one_f_one_b_in_flight
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import plan_step
from dataserver.planning.simulation import Operations, stage_operations
from dataserver.planning.stream.samples import ShardTable, StepSamples
from dataserver.planning.stream.sizing import SampleTooLargeError

SCHEDULES = ("1f1b", "gpipe", "interleaved")
Step = tuple[Job, StepSamples]
SEQ_LEN = 900
"""Of the jobs that `steps` draws: the images of a sequence have 4 x as many patches at most."""


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int, extra: int = 0) -> Operations:
    """The 1F1B list of one stage."""
    return stage_operations(int(one_f_one_b_in_flight(num_stages, extra)[stage]), num_microbatches)


@st.composite
def steps(draw: st.DrawFn, several: bool = False, schedules: Sequence[str] = ("1f1b",)) -> tuple[Job, StepSamples]:
    """A pipelined job of any policy with the samples of one of its steps, from none to more than a batch.

    Args:
        draw: hypothesis.
        several: whether modules differ: encoders and generators for each of two datasets, policies, padding and memory
            of their own. Memory holds one sequence of every rank, not always more.
        schedules: those of the layout to draw from.
    """
    packed, microbatch = draw(st.booleans()), draw(st.integers(1, 3))
    dp, pp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    batch = dp * microbatch * draw(st.integers(1, 4))
    generator = draw(st.integers(0, 3))
    stream = {
        "seq_len": SEQ_LEN,
        "global_batch": batch,
        "sizing": {"max_patches": 256},
        "packing": {"enabled": packed},
        "generation": {"ratio": "0.5" if generator else "0", "query_tokens": draw(st.integers(1, 64))},
    }
    degrees = {"encoder": draw(st.integers(1, 4)), "backbone": (dp, pp), "generator": generator}
    execution = {"microbatch": microbatch, "layout": draw(layouts(schedules))}
    count = draw(st.integers(0, 4 * batch if packed else batch))
    seed, max_images = draw(st.integers(0, 2**32)), draw(st.integers(0, 4))
    if not several:
        job = make_job(stream=stream, execution=execution, balance=draw(st.sampled_from(BALANCES)), **degrees)
        return job, make_samples(job, count, seed, max_images)
    data = job_data(stream=stream | {"datasets": TWO_DATASETS}, execution=execution, **degrees)
    data["execution"]["modules"] = draw(_several(data["execution"]["modules"], packed))
    job = parse_job(data)
    return job, mixed_samples(job, count, seed, max_images)


@st.composite
def tight_jobs(draw: st.DrawFn) -> tuple[Job, list[ShardTable]]:
    """A job over two datasets whose modules have little memory, and a shard of each dataset."""
    dp, pp, packed, generator = (
        *(draw(st.integers(1, 3)) for _ in range(2)),
        draw(st.booleans()),
        draw(st.integers(0, 2)),
    )
    stream = {
        "datasets": TWO_DATASETS,
        "seq_len": SEQ_LEN,
        "global_batch": dp,
        "sizing": {"max_patches": 256},
        "packing": {"enabled": packed},
        "generation": {"ratio": "0.5" if generator else "0"},
    }
    layout = draw(layouts(("1f1b", "gpipe", "interleaved")))
    degrees = {"encoder": draw(st.integers(1, 3)), "backbone": (dp, pp), "generator": generator}
    data = job_data(stream=stream, execution={"layout": layout}, **degrees)
    modules = draw(_several(data["execution"]["modules"], packed))
    for module in modules:
        units = draw(st.integers(200, 900 if module["kind"] == "backbone" else 600))
        module["memory"] = {"budget_bytes": units, "unit_bytes": 1}
    data["execution"]["modules"] = modules
    job, rng = parse_job(data), np.random.default_rng(draw(st.integers(0, 2**32)))
    counts, most = draw(st.tuples(st.integers(0, 8), st.integers(0, 8))), draw(st.integers(0, 3))
    return job, [make_table(job, rng, count, most) for count in counts]


def layouts(schedules: Sequence[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Pipelined layouts of some schedules."""
    order = st.sampled_from(OrderPolicy)
    fields = {
        "1f1b": {"extra_in_flight": st.one_of(st.none(), st.integers(0, 2))},
        "interleaved": {"chunks": st.integers(2, 3)},
    }
    return st.one_of(
        [
            st.fixed_dictionaries(
                {"kind": st.just("pipelined"), "schedule": st.just(s), "order": order, **fields.get(s, {})}
            )
            for s in schedules
        ]
    )


@st.composite
def _several(draw: st.DrawFn, modules: list[dict[str, Any]], packed: bool) -> list[dict[str, Any]]:
    """The modules of a job with a second encoder and generator for the second dataset, and fields of their own."""
    found = []
    for module in modules:
        found.append(module)
        if module["kind"] != "backbone" and draw(st.booleans()):
            other = {**module, "name": f"{module['name']}-x", "dp": draw(st.integers(1, 4)), "datasets": ["x"]}
            found.insert(draw(st.integers(0, len(found))), other)
    frozen = draw(st.lists(st.integers(0, len(found) - 1), max_size=len(found) - 1)) if draw(st.booleans()) else ()
    policies = [draw(_policies(module, packed)) for module in found]
    return [{**module, "frozen": True} if i in frozen else module for i, module in enumerate(policies)]


@st.composite
def _policies(draw: st.DrawFn, module: dict[str, Any], packed: bool) -> dict[str, Any]:
    """A module with a policy, padding unless it is a backbone that packs, and memory."""
    pads = draw(st.booleans()) and not (packed and module["kind"] == "backbone")
    balances = BALANCES if module["kind"] == "backbone" else list(BalancePolicy)
    changes: dict[str, Any] = {"balance": draw(st.sampled_from(balances)), "padded": pads}
    if module["kind"] == "backbone":
        changes["packing"] = draw(st.sampled_from(PackingPolicy))
    if draw(st.booleans()):
        changes["memory"] = {"budget_bytes": draw(st.integers(4, 12)) * 4 * SEQ_LEN * 4, "unit_bytes": 4}
    return {**module, **changes}


def with_memory(job: Job, units: dict[str, int]) -> Job:
    """The same job, with memory for so many tokens or patches of some modules; a unit takes 3 bytes."""
    data = job.spec.model_dump(mode="json")
    for module in data["execution"]["modules"]:
        if module["name"] in units:
            module["memory"] = {"budget_bytes": 3 * units[module["name"]] + 1, "unit_bytes": 3}
    return parse_job(data)


def largest(job: Job, samples: StepSamples) -> dict[str, int]:
    """What the largest sample takes in each module."""
    patches = np.zeros(len(samples), np.int64)
    np.add.at(patches, samples.image_sample, samples.patches)
    return {
        m.name: int((samples.tokens if m.kind is ModuleKind.BACKBONE else patches).max(initial=1))
        for m in job.spec.execution.modules
    }


@st.composite
def tight_steps(draw: st.DrawFn) -> Step:
    """Steps of jobs whose modules hold between one and four of the largest samples."""
    job, samples = draw(steps(several=draw(st.booleans()), schedules=SCHEDULES))
    units = {name: draw(st.integers(size, 4 * size)) for name, size in largest(job, samples).items()}
    return with_memory(job, {name: n for name, n in units.items() if draw(st.integers(0, 3))}), samples


def plan_or_message(job: Job, samples: StepSamples) -> StepPlan | str:
    try:
        return plan_step(job, 3, samples)
    except SampleTooLargeError as error:
        return str(error)


def equal_job(count: int, memory: dict[str, int], stages: int = 4, **layout: Any) -> Step:
    """One rank of backbone stages behind an encoder; `count` samples of 100 tokens and an image of 64 patches."""
    data = job_data(
        stream={"global_batch": count, "seq_len": 512, "packing": {"enabled": False}},
        execution={"layout": {"kind": "pipelined", **layout}},
        backbone=(1, stages),
    )
    job = with_memory(parse_job(data), memory)
    samples = make_samples(make_job(), 4 * count, 1, 1)
    wanted = np.flatnonzero(np.diff(samples.image_offsets) == 1)[:count]
    assert len(wanted) == count
    changed = {
        name: getattr(samples, name)[wanted] for name in ("dataset", "epoch", "sample", "task", "truncated_tokens")
    }
    side = np.full(count, 8, np.int32)
    return job, StepSamples(
        **changed,
        text_tokens=np.full(count, 81, np.int64),
        tokens=np.full(count, 100, np.int64),
        image_offsets=np.arange(count + 1, dtype=np.int64),
        image_rows=side,
        image_columns=side,
    )


def sample_plan() -> StepPlan:
    job = make_job(
        stream={"global_batch": 8, "seq_len": 900, "generation": {"ratio": "0.5"}},
        encoder=2,
        backbone=(2, 2),
        generator=2,
    )
    return plan_step(job, 5, make_samples(job, 30, 1, 2))
