"""The toy layout."""

from collections.abc import Sequence

import numpy as np
from dataserver.planning.layouts.toy.options import ToyOptions

from dataserver.planning.costs.model import backward_ns
from dataserver.planning.job.fields import OrderPolicy
from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import Execution, JobSpec
from dataserver.planning.layouts.interface import Layout, Node, PlannedTimeline
from dataserver.planning.layouts.shared.ablation import (
    AblationEntry,
    canonical_modules,
    cumulative_ablation,
    memory,
    packing,
    sequences,
)
from dataserver.planning.layouts.shared.alternatives import Alternatives, edit_layout, orders, packings
from dataserver.planning.layouts.shared.limits import BackboneLimits
from dataserver.planning.layouts.shared.sequences import fill_percent, pack_step
from dataserver.planning.plan.arranging import arrange_samples
from dataserver.planning.plan.expectation import loads
from dataserver.planning.plan.placement import in_order
from dataserver.planning.plan.plan import NO_GROUPS, ArrangedStep, ModuleSchedule, StepPlan, make_plan
from dataserver.planning.simulation import Pipeline, Program, simulate, stage_operations
from dataserver.planning.stream.samples import StepSamples


def _plan(job: Job, step: int, samples: StepSamples) -> StepPlan:
    execution = job.spec.execution
    sequence, microbatches = pack_step(job, samples)
    turn = np.arange(sequence.max(initial=-1) + 1)
    if execution.options(ToyOptions).order is OrderPolicy.NONE:
        turn = turn[::-1].copy()
    wave, rank = np.divmod(turn, execution.backbone.dp)
    placement = in_order(rank, wave // execution.microbatch, microbatches)
    arranged = ArrangedStep(
        samples=samples,
        num_microbatches=microbatches,
        sequences_per_microbatch=execution.microbatch,
        arrangements=(arrange_samples(execution.backbone, samples, sequence, placement),),
        routings=(),
        schedules=(ModuleSchedule(execution.backbone.name, np.ones(1, np.int64)),),
        groups=NO_GROUPS,
    )
    return make_plan(job, step, arranged)


def _programs(execution: Execution, schedules: Sequence[ModuleSchedule], num_microbatches: int) -> tuple[Program, ...]:
    held = int(schedules[0].in_flight[0])
    return (Program((execution.backbone.name,), 0, stage_operations(held, num_microbatches)),)


def _timeline(spec: JobSpec, plan: ArrangedStep) -> PlannedTimeline:
    backbone = spec.execution.backbone
    forward = loads(spec.execution, plan)[backbone.name]
    pipeline = Pipeline(
        num_stages=1,
        stage=np.zeros(backbone.dp, np.int64),
        forward_ns=forward,
        backward_ns=backward_ns(backbone.cost, forward),
        edges=np.zeros((0, 3), np.int64),
        operations=[p.operations for p in _programs(spec.execution, plan.schedules, plan.num_microbatches)],
    )
    nodes = tuple(Node((backbone.name,), rank, 0) for rank in range(backbone.dp))
    return PlannedTimeline(nodes, pipeline, simulate(pipeline))


def _ablation(job: Job) -> tuple[AblationEntry, ...]:
    plain = job.spec.execution.model_copy(update={"modules": canonical_modules(job)})
    turned = edit_layout(order=job.spec.execution.options(ToyOptions).order)
    changes = packing(job), sequences(job), memory(job), ("turned", turned)
    return cumulative_ablation(job, "canonical order", edit_layout(order=OrderPolicy.NONE)(plain), changes)


def _bound_ns(job: Job, plan: StepPlan) -> int:
    return int(_timeline(job.spec, plan).timeline.busy_ns.sum()) // job.spec.execution.backbone.dp


LAYOUT = Layout(
    plan=_plan,
    ablation=_ablation,
    finalists=lambda _: (),
    programs=_programs,
    timeline=_timeline,
    lower_bound_ns=_bound_ns,
    loads=loads,
    limits=BackboneLimits,
    alternatives=lambda job: Alternatives(packings(job), [orders()]),
    figures=lambda _own, job, plan: fill_percent(job, plan),
)
