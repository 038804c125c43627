"""How many microbatches a plan chooses: more where stages would wait, fewer where each costs too much."""

import json
import re
from typing import Any

import numpy as np
import pytest
from builders.jobs import job_data, make_job
from builders.samples import make_samples

from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.layouts.pipelined.comparing import Compared, compare
from dataserver.planning.layouts.pipelined.counts import Counts
from dataserver.planning.planner import plan_step, timeline
from dataserver.planning.stream.samples import StepSamples

STAGES = 6
SEQUENCES = 4
"""That the samples of a step need; fewer than stages, so that most of these wait."""


def step_of(samples: int = 60, seed: int = 0, **changes: Any) -> tuple[Job, StepSamples]:
    """A step of four sequences on one rank of six stages, and a job with other values in its backbone or its layout."""
    data = job_data(backbone=(1, STAGES), stream={"global_batch": SEQUENCES, "seq_len": 4096})
    fields = {name: changes.pop(name) for name in ("memory", "cost", "packing") if name in changes}
    data["execution"]["modules"][1] |= fields
    data["execution"]["layout"] = {"kind": "pipelined", **changes}
    job = parse_job(data)
    return job, make_samples(job, samples, seed)


def makespan(job: Job, samples: StepSamples) -> int:
    return timeline(job.spec, plan_step(job, 0, samples)).makespan_ns


def test_stages_that_would_wait_get_more_and_smaller_microbatches() -> None:
    job, samples = step_of()
    plan, fewest = plan_step(job, 0, samples), step_of(fewest_microbatches=True)[0]
    assert plan_step(fewest, 0, samples).num_microbatches == SEQUENCES
    assert plan.num_microbatches >= 3 * SEQUENCES
    assert 3 * makespan(job, samples) < 2 * makespan(fewest, samples)
    (said,) = (d for d in plan.decisions if d.chosen == f"{plan.num_microbatches} microbatches of each rank")
    assert re.fullmatch(rf"simulated [\d.]+ ms, against [\d.]+ ms with {SEQUENCES}", said.reason)


def test_a_job_may_ask_for_the_fewest() -> None:
    job, samples = step_of(fewest_microbatches=True)
    plan = plan_step(job, 0, samples)
    assert plan.num_microbatches == SEQUENCES
    assert not any("microbatches" in c.name for c in plan.candidates)
    assert "fewest_microbatches" not in json.loads(step_of()[0].text)["execution"]["layout"]
    assert step_of(fewest_microbatches=False)[0].job_id == step_of()[0].job_id != job.job_id


def test_the_price_of_a_microbatch_keeps_steps_whole() -> None:
    """The dearer a microbatch that holds nothing, the fewer there are."""
    linear, numbers = 35_381_757, []
    for price in (0, 4_000_000, 40_000_000, 1_000_000_000):
        job, samples = step_of(cost={"microbatch_ns": price, "linear_ps": linear, "quadratic_fs": 0})
        numbers.append(plan_step(job, 0, samples).num_microbatches)
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[2] > numbers[3] == SEQUENCES


def test_stages_that_never_wait_keep_the_fewest() -> None:
    job = make_job(encoder=0, backbone=(2, 1), stream={"global_batch": 8})
    samples = make_samples(job, 24)
    fewest = next(Counts(job, 0, samples).ladder()).num_microbatches
    assert plan_step(job, 0, samples).num_microbatches == fewest


@pytest.mark.parametrize("policies", [{}, {"order": "none"}, {"schedule": "interleaved", "chunks": 2}])
def test_sequences_and_numbers_do_not_depend_on_memory(policies: dict[str, Any]) -> None:
    def ladder(units: int | None) -> list[tuple[int, bytes]]:
        memory = {} if units is None else {"memory": {"budget_bytes": units, "unit_bytes": 1}}
        job, samples = step_of(**policies, **memory)
        return [(p.num_microbatches, p.sequence.tobytes()) for p in Counts(job, 0, samples).ladder()]

    free = ladder(None)
    step = STAGES if policies.get("chunks") else 1
    fewest = -(-SEQUENCES // step) * step
    wanted = {-(-min(60, fewest * halves // 2) // step) * step for halves in (2, 3, 4, 6, 8, 12, 16, 24, 32)}
    assert [number for number, _ in free] == sorted(wanted), "until each of 60 samples has one"
    assert ladder(500) == ladder(2_000) == free


def test_a_ladder_ends_where_microbatches_would_not_be_smaller() -> None:
    job, samples = step_of(packing="best_fit")
    assert [p.num_microbatches for p in Counts(job, 0, samples).ladder()] == [SEQUENCES]
    job, samples = step_of(samples=5)
    assert [p.num_microbatches for p in Counts(job, 0, samples).ladder()] == [SEQUENCES, 5]


def test_each_number_has_a_search_of_its_own() -> None:
    """What is found with a number is the same whatever else is tried: candidates of less memory, where it fits."""

    def searched(units: int) -> dict[int, int]:
        job, samples = step_of(memory={"budget_bytes": units, "unit_bytes": 1})
        found = compare(Counts(job, 0, samples))
        assert isinstance(found, Compared)
        of_search = [c for c in found.candidates if c.name.startswith("search") and not c.in_flight.is_short]
        return {c.num_microbatches: c.makespan_ns for c in reversed(of_search)}

    ample, tight = searched(1 << 30), searched(8_000)
    assert ample
    assert tight
    both = ample.keys() & tight.keys()
    assert both
    assert all(ample[number] == tight[number] for number in both)


def test_memory_that_holds_no_sequence_of_any_number_makes_do_with_its_own() -> None:
    """Memory for the largest sample alone: sequences are packed for it, or every sample is alone."""
    job, samples = step_of()
    most = int(samples.tokens.max())
    tight = step_of(memory={"budget_bytes": most, "unit_bytes": 1})[0]
    plan = plan_step(tight, 0, samples)
    held = np.zeros(plan.num_microbatches, np.int64)
    backbone = plan.arrangement("llm")
    np.add.at(held, backbone.microbatch, samples.tokens[backbone.item])
    assert held.max() <= most
    assert makespan(tight, samples) >= makespan(job, samples)
