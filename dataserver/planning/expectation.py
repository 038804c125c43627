"""What the simulator expects of a plan: loads, timeline, and the same without balancing."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataserver.planning.costs import backward_ns, forward_ns
from dataserver.planning.jobspec import Cost, Execution, JobSpec, ModuleKind, ModuleSpec
from dataserver.planning.pipeline import Pipeline, Timeline, simulate
from dataserver.planning.plan import Arrangement, StepPlan
from dataserver.planning.samples import I64


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Times of one stage of the joined pipeline, int64 [ranks, microbatches] nanoseconds."""

    module: ModuleSpec
    forward: I64
    backward: I64


@dataclass(frozen=True, slots=True)
class PlannedTimeline:
    """A simulated step with the meaning of its nodes."""

    nodes: tuple[tuple[str, int, int], ...]
    """Module, rank and pipeline stage within the module, of each node of the timeline."""
    pipeline: Pipeline
    timeline: Timeline
    stages: tuple[StageTimes, ...]
    """One for each stage of the joined pipeline."""

    @property
    def makespan_ns(self) -> int:
        """Simulated time of the step."""
        return self.timeline.makespan_ns


def module_loads(spec: JobSpec, plan: StepPlan) -> dict[str, I64]:
    """For each module int64 [dp]: planned forward time of each rank over the step, nanoseconds."""
    return {m.name: _times(plan, m).sum(axis=1) for m in spec.execution.modules}


def imbalance(loads: Sequence[int]) -> float:
    """Largest load over mean load; 1 is perfect balance. For people, never for decisions."""
    total = int(sum(loads))
    return 1.0 if total == 0 else int(max(loads)) * len(loads) / total


def timeline(spec: JobSpec, plan: StepPlan) -> PlannedTimeline:
    """Simulate a plan: every rank of every stage, joined as the routings say."""
    modules = pipeline_modules(spec.execution)
    stages = [_stage_times(m, _times(plan, m)) for m in modules for _ in range(m.pp)]
    pipeline = Pipeline(
        num_stages=len(stages),
        stage=np.repeat(np.arange(len(stages)), [s.module.dp for s in stages]),
        forward_ns=np.concatenate([s.forward for s in stages]),
        backward_ns=np.concatenate([s.backward for s in stages]),
        edges=_edges(modules, plan),
        extra_in_flight=spec.execution.extra_in_flight,
    )
    nodes = tuple((m.name, r, s) for m in modules for s in range(m.pp) for r in range(m.dp))
    return PlannedTimeline(nodes, pipeline, simulate(pipeline), tuple(stages))


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
            [r.microbatch, r.source_rank + last[r.source_module], r.target_rank + first[r.target_module]], axis=1
        )
        found.append(np.unique(edges, axis=0))
    return np.concatenate(found)


def pipeline_modules(execution: Execution) -> list[ModuleSpec]:
    """The modules in the order of the joined pipeline: encoder, backbone, generator."""
    kinds = (ModuleKind.ENCODER, ModuleKind.BACKBONE, ModuleKind.GENERATOR)
    return [m for m in (execution.of_kind(k) for k in kinds) if m is not None]


def _times(plan: StepPlan, module: ModuleSpec) -> I64:
    """int64 [dp, microbatches]: forward time of a whole module."""
    arrangement: Arrangement = plan.arrangement(module.name)
    sizes = plan.samples.tokens if module.kind is ModuleKind.BACKBONE else plan.samples.patches
    shape = (module.dp, plan.num_microbatches)
    return _sums(module.cost, sizes[arrangement.item], arrangement.rank, arrangement.microbatch, shape)


def _sums(cost: Cost, sizes: I64, rank: I64, wave: I64, shape: tuple[int, int]) -> I64:
    times = np.full(shape, cost.microbatch_ns, np.int64)
    np.add.at(times, (rank, wave), forward_ns(cost, sizes))
    return times


def _stage_times(module: ModuleSpec, times: I64) -> StageTimes:
    forward = times // module.pp
    return StageTimes(module, forward, backward_ns(module.cost, forward))
