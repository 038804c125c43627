"""The share of work that only pads, in millionths."""

import pytest
from builders.jobs import job_data
from builders.samples import make_samples

from dataserver.planning.job.identity import parse_job
from dataserver.planning.plan.expectation import microbatch_loads, padding_ppm
from dataserver.planning.planner import plan_step


@pytest.mark.parametrize("seed", range(4))
def test_padding_is_the_share_of_the_padded_work_that_pads(seed: int) -> None:
    data = job_data(
        encoder=2, backbone=(2, 1), stream={"global_batch": 8, "seq_len": 4096, "packing": {"enabled": False}}
    )
    data["execution"]["modules"][0]["padded"] = True
    job = parse_job(data)
    plan = plan_step(job, 0, make_samples(job, 8, seed, max_images=3))
    vit, llm = job.spec.execution.modules
    padded = int(microbatch_loads(vit, plan).sum())
    plain = int(microbatch_loads(vit.model_copy(update={"padded": False}), plan).sum())
    assert padded > plain > 10**6
    found = padding_ppm(vit, plan)
    assert found * padded <= (padded - plain) * 10**6 < (found + 1) * padded
    assert padding_ppm(llm, plan) == 0
