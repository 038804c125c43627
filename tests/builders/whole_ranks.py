"""Jobs with modality parity, identity routing or both, and the samples of a step."""

import copy

import numpy as np
from builders.jobs import BALANCES, Data, job_data
from builders.pipelined import SEQ_LEN, Step, layouts
from builders.samples import make_samples
from hypothesis import strategies as st

from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.stream.samples import StepSamples


@st.composite
def whole_steps(draw: st.DrawFn, parity: bool | None = None, identity: bool | None = None) -> Step:
    """A job that asks for parity or identity routing, drawn where not given, with samples, some of them with images."""
    packed, microbatch = draw(st.booleans()), draw(st.integers(1, 3))
    dp, pp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    batch, identity = dp * microbatch * draw(st.integers(1, 4)), draw(st.booleans()) if identity is None else identity
    data = job_data(
        stream={
            "seq_len": SEQ_LEN,
            "global_batch": batch,
            "sizing": {"max_patches": 256},
            "packing": {"enabled": packed},
        },
        execution={
            "microbatch": microbatch,
            "layout": draw(layouts(("1f1b", "gpipe", "interleaved"))),
            "modality_parity": draw(st.booleans()) if parity is None else parity,
            "identity_routing": identity,
        },
        encoder=dp if identity else draw(st.integers(1, 4)),
        backbone=(dp, pp),
    )
    encoder, backbone = data["execution"]["modules"]
    backbone["balance"] = draw(st.sampled_from(BALANCES))
    encoder |= {"frozen": draw(st.booleans()), "padded": draw(st.booleans())}
    job = parse_job(data)
    count = draw(st.integers(0, 4 * batch if packed else batch))
    return job, make_samples(job, count, draw(st.integers(0, 2**32)), draw(st.integers(1, 3)))


def without(job: Job, *fields: str) -> Job:
    """The same job that does not ask for something."""
    data: Data = copy.deepcopy(job.spec.model_dump(mode="json"))
    for field in fields:
        data["execution"][field] = None
    return parse_job(data)


def samples_with_images(samples: StepSamples) -> list[bool]:
    """Of each sample whether it has any."""
    return (np.diff(samples.image_offsets) > 0).tolist()


def waves_by_ranks(job: Job, plan: StepPlan) -> list[int]:
    """For each wave the backbone ranks that have images, counted by hand."""
    has, found = samples_with_images(plan.samples), plan.arrangement(job.spec.execution.backbone.name)
    ranks: list[set[int]] = [set() for _ in range(plan.num_microbatches)]
    for item, rank, wave in zip(found.item.tolist(), found.rank.tolist(), found.microbatch.tolist(), strict=True):
        if has[item]:
            ranks[wave].add(rank)
    return [len(r) for r in ranks]
