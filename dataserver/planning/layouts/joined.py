"""The joined pipeline of a job: encoders, backbone stages, generators, and its simulation."""

import numpy as np

from dataserver.planning.costs import backward_ns
from dataserver.planning.expectation import microbatch_loads
from dataserver.planning.jobspec import Execution, JobSpec, ModuleKind, ModuleSpec, PipelineLayout, Schedule
from dataserver.planning.layouts.interface import Node, PlannedTimeline
from dataserver.planning.pipeline import Pipeline, gpipe_in_flight, one_f_one_b_in_flight, simulate
from dataserver.planning.plan import ModuleSchedule, StepPlan
from dataserver.planning.samples import I64

_DEPTH = (ModuleKind.ENCODER, ModuleKind.BACKBONE, ModuleKind.GENERATOR)


def pipeline_layout(execution: Execution) -> PipelineLayout:
    """The layout of a pipelined job; TypeError for another one."""
    if not isinstance(execution.layout, PipelineLayout):
        raise TypeError(f"found a {execution.layout.kind} layout where a pipeline is planned")
    return execution.layout


def pipeline_modules(execution: Execution) -> list[ModuleSpec]:
    """The modules in the order of the joined pipeline: encoders, backbone, generators."""
    return [m for kind in _DEPTH for m in execution.of_kind(kind)]


def depths(execution: Execution) -> dict[str, I64]:
    """For each module int64 [pp]: place of its stages in the joined pipeline; encoders all stand at 0."""
    first, found = 0, {}
    for kind in _DEPTH:
        modules = execution.of_kind(kind)
        for module in modules:
            found[module.name] = first + np.arange(module.pp)
        first += max((m.pp for m in modules), default=0)
    return found


def schedules(execution: Execution, num_microbatches: int) -> tuple[ModuleSchedule, ...]:
    """Microbatches in flight, as far as memory does not limit them."""
    places, layout = depths(execution), pipeline_layout(execution)
    num_stages = 1 + max(int(place.max()) for place in places.values())
    if layout.schedule is Schedule.GPIPE:
        held = gpipe_in_flight(num_stages, num_microbatches)
    else:
        held = one_f_one_b_in_flight(num_stages, layout.extra_in_flight or 0)
    return tuple(ModuleSchedule(m.name, held[places[m.name]]) for m in execution.modules)


def placing_in_flight(execution: Execution, num_microbatches: int) -> I64:
    """The same as `placing.PlacementProblem` has it: encoder, backbone stages, generator. int64 [stages + 2]."""
    held = {s.module: s.in_flight for s in schedules(execution, num_microbatches)}
    backbone = held[execution.backbone.name]
    ends = (
        max((int(held[m.name][0]) for m in execution.of_kind(kind)), default=1)
        for kind in (ModuleKind.ENCODER, ModuleKind.GENERATOR)
    )
    first, last = ends
    return np.concatenate([[first], backbone, [last]])


def timeline(spec: JobSpec, plan: StepPlan) -> PlannedTimeline:
    """Simulate a plan: every rank of every stage, joined as the routings say."""
    modules = pipeline_modules(spec.execution)
    stages = [(m, microbatch_loads(m, plan) // m.pp) for m in modules for _ in range(m.pp)]
    pipeline = Pipeline(
        num_stages=len(stages),
        stage=np.repeat(np.arange(len(stages)), [m.dp for m, _ in stages]),
        forward_ns=np.concatenate([forward for _, forward in stages]),
        backward_ns=np.concatenate([backward_ns(m.cost, forward) for m, forward in stages]),
        edges=_edges(modules, plan),
        in_flight=np.concatenate([plan.in_flight(m.name) for m in modules]),
    )
    nodes = tuple(Node((m.name,), r, s) for m in modules for s in range(m.pp) for r in range(m.dp))
    return PlannedTimeline(nodes, pipeline, simulate(pipeline))


def _edges(modules: list[ModuleSpec], plan: StepPlan) -> I64:
    """Edges between nodes that are numbered by module, stage and rank: int64 [e, 3]."""
    sizes = [m.dp * m.pp for m in modules]
    first = dict(zip([m.name for m in modules], np.cumsum([0, *sizes]).tolist(), strict=False))
    last = {m.name: first[m.name] + m.dp * (m.pp - 1) for m in modules}
    found = []
    for module in modules:
        node = first[module.name] + np.arange(module.dp * (module.pp - 1))
        wave = np.repeat(np.arange(plan.num_microbatches), len(node))
        node = np.tile(node, plan.num_microbatches)
        found.append(np.stack([wave, node, node + module.dp], axis=1))
    for r in plan.routings:
        edges = np.stack(
            [r.source_microbatch, r.source_rank + last[r.source_module], r.target_rank + first[r.target_module]], axis=1
        )
        found.append(np.unique(edges, axis=0))
    return np.concatenate(found)
