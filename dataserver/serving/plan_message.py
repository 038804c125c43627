"""A step's plan as a message, with what the simulator expects of it."""

from collections.abc import Iterator

import numpy as np
from disttrain.v1 import plan_pb2, program_pb2

from dataserver.fleet.schedule_message import schedule_messages
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.interface import PlannedTimeline
from dataserver.planning.plan.expectation import padding_ppm
from dataserver.planning.plan.plan import Arrangement, StepPlan
from dataserver.planning.planner import PlanSummary, programs
from dataserver.planning.simulation import Program
from dataserver.serving.wire import denominators


def plan_message(job: Job, plan: StepPlan, summary: PlanSummary, *, with_timelines: bool = False) -> plan_pb2.StepPlan:
    """The message of one plan, `summary` being what `explain` says of it; if asked with the times of all operations."""
    return plan_pb2.StepPlan(
        job_id=plan.job_id,
        stream_id=plan.stream_id,
        step=plan.step,
        plan_hash=plan.hash,
        num_microbatches=plan.num_microbatches,
        denominators=denominators(plan),
        samples=_samples(plan),
        loads=[
            plan_pb2.ModuleLoad(
                module=module.name,
                before_ns=summary.loads_before[module.name].tolist(),
                after_ns=summary.loads_after[module.name].tolist(),
                padding_ppm=padding_ppm(module, plan),
            )
            for module in job.spec.execution.modules
        ],
        makespan_before_ns=summary.before.makespan_ns,
        makespan_after_ns=summary.after.makespan_ns,
        bubble_before_ppm=summary.before.timeline.bubble_ppm,
        bubble_after_ppm=summary.after.timeline.bubble_ppm,
        lower_bound_ns=summary.bound_ns,
        candidates=[plan_pb2.Candidate(name=c.name, makespan_ns=c.makespan_ns) for c in plan.candidates],
        decisions=[plan_pb2.Decision(subject=d.subject, chosen=d.chosen, reason=d.reason) for d in plan.decisions],
        arrangements=[_arrangement(a) for a in plan.arrangements],
        schedules=schedule_messages(plan),
        groups=_groups(plan),
        programs=[_program(p) for p in programs(job.spec.execution, plan)],
        timelines=_timelines(summary.after) if with_timelines else (),
    )


def _samples(plan: StepPlan) -> plan_pb2.PlannedSamples:
    samples = plan.samples
    return plan_pb2.PlannedSamples(
        dataset=samples.dataset.tolist(),
        epoch=samples.epoch.tolist(),
        sample=samples.sample.tolist(),
        task=samples.task.tolist(),
        tokens=samples.tokens.tolist(),
        truncated_tokens=samples.truncated_tokens.tolist(),
        images=np.diff(samples.image_offsets).tolist(),
        part=[] if samples.parts is None else samples.parts[:, 0].tolist(),
    )


def _arrangement(arrangement: Arrangement) -> plan_pb2.ModuleArrangement:
    return plan_pb2.ModuleArrangement(
        module=arrangement.module,
        item=arrangement.item.tolist(),
        rank=arrangement.rank.tolist(),
        microbatch=arrangement.microbatch.tolist(),
        slot=arrangement.slot.tolist(),
    )


def _program(program: Program) -> program_pb2.StageProgram:
    operations = program.operations
    return program_pb2.StageProgram(
        modules=program.modules,
        stage=program.stage,
        kind=(operations.kind + program_pb2.OPERATION_KIND_FORWARD).tolist(),
        chunk=operations.chunk.tolist(),
        microbatch=operations.microbatch.tolist(),
    )


def _timelines(planned: PlannedTimeline) -> Iterator[plan_pb2.RankTimeline]:
    starts, ends = planned.timeline.start_ns, planned.timeline.end_ns
    for number, node in enumerate(planned.nodes):
        count = len(planned.pipeline.operations[int(planned.pipeline.stage[number])])
        yield plan_pb2.RankTimeline(
            modules=node.modules,
            stage=node.stage,
            rank=node.rank,
            start_ns=starts[number, :count].tolist(),
            end_ns=ends[number, :count].tolist(),
        )


def _groups(plan: StepPlan) -> plan_pb2.PlannedGroups | None:
    groups = plan.groups
    if not len(groups.degree):
        return None
    return plan_pb2.PlannedGroups(
        module=groups.module,
        microbatch=groups.microbatch.tolist(),
        first_rank=groups.first_rank.tolist(),
        degree=groups.degree.tolist(),
    )
