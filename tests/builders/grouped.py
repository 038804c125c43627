"""Grouped jobs with the samples of a step."""

from typing import Any

from builders.jobs import Data, job_data
from builders.samples import make_samples
from hypothesis import strategies as st
from planning_rows.flexsp_profiles import A100_CLUSTER, PROFILES, group_costs

from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.samples import StepSamples

PROFILE = PROFILES["7b-192k"]
A100 = group_costs(PROFILE, A100_CLUSTER)


def grouped_data(dp: int, units: int, groups: Data, cost: dict[str, int] | None = None, **arguments: Any) -> Data:
    """`job_data` in groups: `units` tokens fit on each of `dp` ranks."""
    least, most = groups.get("min_degree", 1), groups["max_degree"]
    degrees = [1 << p for p in range(1, most.bit_length()) if 1 << p >= least]
    exchange = [{"degree": d, "unit_ps": 400_000 * d.bit_length()} for d in degrees]
    layout = {"kind": "grouped", "exchange": exchange, **groups}
    data = job_data(backbone=(dp, 1), execution={"layout": layout}, **arguments)
    backbone = backbone_of(data)
    backbone["memory"] = {"budget_bytes": 100 * units, "unit_bytes": 100}
    if cost is not None:
        backbone["cost"] = cost
    return data


def backbone_of(data: Data) -> Data:
    """The backbone of a job's data."""
    found: Data = next(m for m in data["execution"]["modules"] if m["kind"] == "backbone")
    return found


def published_job(policy: str = "search", backward_percent: int = 100, **arguments: Any) -> Job:
    """FlexSP's 7B at 192K on 64 A100, half of each constant in the forward pass."""
    both = 100 + backward_percent
    cost = {
        "microbatch_ns": PROFILE.fixed_ns * 100 // both,
        "linear_ps": PROFILE.linear_ps * 100 // both,
        "quadratic_fs": PROFILE.quadratic_fs * 100 // both,
        "backward_percent": backward_percent,
    }
    exchange = [{"degree": d, "unit_ps": PROFILE.transfer_ps(b)} for d, b in A100_CLUSTER.bandwidths]
    stream = {"seq_len": 192_000, "global_batch": 512, "packing": {"enabled": False}}
    groups = {"policy": policy, "max_degree": 64, "exchange": exchange}
    return parse_job(grouped_data(64, A100.device_tokens, groups, cost, stream=stream, encoder=0, **arguments))


@st.composite
def grouped_steps(draw: st.DrawFn) -> tuple[Job, StepSamples]:
    """A grouped job, maybe with frozen modules, and the samples of one of its steps, from none to a batch and more."""
    most = draw(st.sampled_from([1, 2, 4, 8]))
    least = draw(st.sampled_from([d for d in (1, 2) if d <= most]))
    dp, batch = most * draw(st.integers(1, 3)), draw(st.integers(1, 24))
    packed, generator = draw(st.booleans()), draw(st.integers(0, 2))
    units = -(-draw(st.integers(600, 1500)) // most)
    stream = {
        "seq_len": 600,
        "global_batch": batch,
        "sizing": {"max_patches": 256},
        "packing": {"enabled": packed},
        "generation": {"ratio": "0.5" if generator else "0", "query_tokens": draw(st.integers(1, 64))},
    }
    schedule = draw(st.sampled_from(["1f1b", "gpipe"]))
    groups = {
        "policy": draw(st.sampled_from(["search", "homogeneous", "static"])),
        "min_degree": least,
        "max_degree": most,
        "schedule": schedule,
        "order": draw(st.sampled_from(["none", "disttrain", "search"])),
        "extra_in_flight": None if schedule == "gpipe" else draw(st.sampled_from([None, 0, 2])),
    }
    data = grouped_data(
        dp,
        units,
        groups,
        draw(st.sampled_from([None, {"linear_ps": 0, "quadratic_fs": 0}, {"linear_ps": 70_000, "quadratic_fs": 90}])),
        stream=stream,
        encoder=draw(st.integers(1, 3)),
        generator=generator,
    )
    frozen = draw(st.booleans())
    for module in data["execution"]["modules"]:
        if module["kind"] != "backbone" and draw(st.booleans()):
            module["memory"] = {"budget_bytes": 4 * draw(st.integers(1024, 8192)), "unit_bytes": 4}
        if draw(st.booleans()) and frozen:
            module["frozen"] = True
        if module["kind"] == "backbone":
            module["packing"] = draw(st.sampled_from(["balanced", "best_fit"]))
    job = parse_job(data)
    samples = make_samples(job, draw(st.integers(0, 2 * batch)), draw(st.integers(0, 2**32)), draw(st.integers(0, 2)))
    return job, samples


def sample_groups() -> StepPlan:
    """A plan whose groups were searched for."""
    stream = {"seq_len": 600, "global_batch": 32, "sizing": {"max_patches": 256}, "generation": {"ratio": "0.5"}}
    job = parse_job(grouped_data(8, 150, {"max_degree": 8}, stream=stream, encoder=3, generator=2))
    return plan_step(job, 7, make_samples(job, 60, 4, 2))
