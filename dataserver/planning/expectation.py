"""What the simulator expects of a plan: loads, timeline, and the same without balancing."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataserver.planning.arranging import TASK_OF, images_in_order
from dataserver.planning.costs import backward_ns, forward_ns
from dataserver.planning.jobspec import Cost, Execution, JobSpec, ModuleKind, ModuleSpec
from dataserver.planning.pipeline import Node, Timeline, simulate
from dataserver.planning.plan import Arrangement, Routing, StepPlan
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
    num_stages: int
    """Stages of the joined pipeline."""
    timeline: Timeline
    stages: tuple[StageTimes, ...]

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
    names = [(m.name, r, s) for m in modules for s in range(m.pp) for r in range(m.dp)]
    number = {name: i for i, name in enumerate(names)}
    feeds: list[list[set[int]]] = [[set() for _ in range(plan.num_microbatches)] for _ in names]
    for module, rank, stage in names:
        if (module, rank, stage + 1) in number:
            for fed in feeds[number[module, rank, stage]]:
                fed.add(number[module, rank, stage + 1])
    last_stage = {m.name: m.pp - 1 for m in modules}
    for routing in plan.routings:
        _join(routing, last_stage, number, feeds)
    nodes = [
        Node(stage, times.forward[rank], times.backward[rank], tuple(tuple(sorted(f)) for f in feeds[i]))
        for i, (stage, times, rank) in enumerate(
            (stage, times, rank) for stage, times in enumerate(stages) for rank in range(times.module.dp)
        )
    ]
    result = simulate(nodes, len(stages), plan.num_microbatches)
    return PlannedTimeline(tuple(names), len(stages), result, tuple(stages))


def own_times(spec: JobSpec, plan: StepPlan) -> list[StageTimes]:
    """For each stage of the joined pipeline the times that each backbone microbatch's own samples cause there.

    int64 [backbone dp, microbatches]. The images of a wave are spread over all ranks of an encoder or generator, so a
    backbone rank's own images count there in proportion to the two degrees.
    """
    backbone = spec.execution.backbone
    arrangement = plan.arrangement(backbone.name)
    stages = []
    for module in pipeline_modules(spec.execution):
        if module.kind is ModuleKind.BACKBONE:
            times = _times(plan, module)
        else:
            image, rank, wave = images_in_order(plan.samples, arrangement, TASK_OF[module.kind])
            own = _sums(module.cost, plan.samples.patches[image], rank, wave, (backbone.dp, plan.num_microbatches))
            times = own * backbone.dp // module.dp
        stages += [_stage_times(module, times)] * module.pp
    return stages


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


def _join(
    routing: Routing,
    last_stage: dict[str, int],
    number: dict[tuple[str, int, int], int],
    feeds: list[list[set[int]]],
) -> None:
    """Edges of one routing: from the source's last stage to the target's first."""
    edges = np.unique(np.stack([routing.microbatch, routing.source_rank, routing.target_rank], axis=1), axis=0)
    for wave, source, target in edges.tolist():
        giver = number[routing.source_module, source, last_stage[routing.source_module]]
        feeds[giver][wave].add(number[routing.target_module, target, 0])
