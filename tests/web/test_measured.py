"""Measured passes stand in the timeline where they say what the planned ones do, and are counted."""

from collections.abc import Iterator
from typing import Any

import pytest
from builders.jobs import job_data
from builders.samples import make_samples
from disttrain.v1.data_service_pb2 import StepTimes

from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import plan_step, timeline
from dataserver.web.measured import measured_document

INTERLEAVED = {"layout": {"kind": "pipelined", "schedule": "interleaved", "chunks": 2}}


def planned(**execution: Any) -> tuple[Job, StepPlan]:
    data = job_data(stream={"seq_len": 512, "global_batch": 8}, execution=execution, encoder=2, backbone=(2, 2))
    job = parse_job(data)
    return job, plan_step(job, 0, make_samples(job, 16, 1, 2))


def reports(job: Job, plan: StepPlan, *modules: str) -> Iterator[StepTimes]:
    """As ranks would send them: of each module, rank and stage one, with 1 ms for each pass."""
    times = [10**6] * plan.num_microbatches
    for module in job.spec.execution.modules:
        for rank in range(module.dp if module.name in modules else 0):
            for stage in range(module.pp):
                yield StepTimes(step=0, module=module.name, rank=rank, stage=stage, forward_ns=times, backward_ns=times)


@pytest.mark.parametrize(
    ("execution", "modules", "replaced", "expected"),
    [
        ({}, ["vit", "llm"], 6, 6),
        ({}, ["vit"], 2, 6),
        ({}, [], 0, 6),
        (INTERLEAVED, ["llm"], 0, 6),
        (INTERLEAVED, ["vit", "llm"], 2, 6),
    ],
)
def test_only_passes_that_were_measured_one_by_one_count(
    execution: dict[str, Any], modules: list[str], replaced: int, expected: int
) -> None:
    job, plan = planned(**execution)
    found, shown = measured_document(job, plan, list(reports(job, plan, *modules)))
    assert (found["replaced"], found["expected"]) == (replaced, expected)
    assert (shown is not None) == (replaced > 0)
    if shown is not None:
        was = timeline(job.spec, plan)
        assert shown.makespan_ns != was.makespan_ns


def test_encoders_on_ranks_of_the_backbone_have_no_timeline_of_their_own() -> None:
    data = job_data(
        stream={"seq_len": 900, "global_batch": 12}, execution={"identity_routing": True}, encoder=2, backbone=(2, 1)
    )
    job = parse_job(data)
    plan = plan_step(job, 0, make_samples(job, 48, 1, 2))
    found, shown = measured_document(job, plan, list(reports(job, plan, "vit", "llm")))
    assert (len(found["rows"]), found["replaced"], shown) == (4, 0, None)
