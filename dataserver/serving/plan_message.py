"""A step's plan as a message, with what the simulator expects of it."""

import numpy as np
from disttrain.v1 import plan_pb2

from dataserver.planning.identity import Job
from dataserver.planning.plan import StepPlan
from dataserver.planning.planner import PlanSummary
from dataserver.planning.samples import I64
from dataserver.serving.wire import denominators


def plan_message(job: Job, plan: StepPlan, summary: PlanSummary) -> plan_pb2.StepPlan:
    """The message of one plan, `summary` being what `explain` says of it."""
    return plan_pb2.StepPlan(
        job_id=plan.job_id,
        stream_id=plan.stream_id,
        step=plan.step,
        plan_hash=plan.hash,
        num_microbatches=plan.num_microbatches,
        denominators=denominators(plan),
        samples=_samples(job, plan),
        loads=[
            plan_pb2.ModuleLoad(
                module=module.name,
                before_ns=summary.loads_before[module.name].tolist(),
                after_ns=summary.loads_after[module.name].tolist(),
            )
            for module in job.spec.execution.modules
        ],
        makespan_before_ns=summary.before.makespan_ns,
        makespan_after_ns=summary.after.makespan_ns,
        bubble_before_ppm=summary.before.timeline.bubble_ppm,
        bubble_after_ppm=summary.after.timeline.bubble_ppm,
        lower_bound_ns=summary.bound_ns,
        candidates=[plan_pb2.Candidate(name=c.name, makespan_ns=c.makespan_ns) for c in plan.candidates],
    )


def _samples(job: Job, plan: StepPlan) -> plan_pb2.PlannedSamples:
    samples = plan.samples
    rank, microbatch, slot = _placement(job, plan)
    return plan_pb2.PlannedSamples(
        dataset=samples.dataset.tolist(),
        pass_number=samples.pass_.tolist(),
        sample=samples.sample.tolist(),
        task=samples.task.tolist(),
        tokens=samples.tokens.tolist(),
        truncated_tokens=samples.truncated_tokens.tolist(),
        images=np.diff(samples.image_offsets).tolist(),
        rank=rank.tolist(),
        microbatch=microbatch.tolist(),
        slot=slot.tolist(),
    )


def _placement(job: Job, plan: StepPlan) -> tuple[I64, I64, I64]:
    """Backbone rank, microbatch and slot of each sample, int64 [n], in canonical order."""
    arrangement = plan.arrangement(job.spec.execution.backbone.name)
    order = np.argsort(arrangement.item)
    return arrangement.rank[order], arrangement.microbatch[order], arrangement.slot[order]
