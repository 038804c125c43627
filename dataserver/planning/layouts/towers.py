"""The simulation of a contrastive plan, and its lower bound."""

import numpy as np

from dataserver.planning.contrastive import TowerTimes, contrastive_pipeline
from dataserver.planning.costs import backward_ns, forward_ns
from dataserver.planning.expectation import item_sizes, microbatch_loads
from dataserver.planning.identity import Job
from dataserver.planning.jobspec import ContrastiveLayout, ContrastiveSchedule, Execution, JobSpec, ModuleSpec
from dataserver.planning.layouts.interface import Node, PlannedTimeline
from dataserver.planning.layouts.tower_memory import sums_with_padding
from dataserver.planning.pipeline import simulate
from dataserver.planning.plan import StepPlan
from dataserver.planning.samples import I64


def contrastive_layout(execution: Execution) -> ContrastiveLayout:
    """The layout of a contrastive job; TypeError for another one."""
    if not isinstance(execution.layout, ContrastiveLayout):
        raise TypeError(f"found a {execution.layout.kind} layout where towers are planned")
    return execution.layout


def timeline(spec: JobSpec, plan: StepPlan) -> PlannedTimeline:
    """Simulate a plan: every rank of every stage of every tower, joined by the interactions."""
    layout, towers = contrastive_layout(spec.execution), spec.execution.modules
    groups = plan.num_microbatches // layout.microbatches
    overlapping = not any(s.drain_every for s in plan.schedules)
    pipeline = contrastive_pipeline(
        [_times(tower, plan) for tower in towers],
        np.full(groups, layout.interaction_ns),
        ContrastiveSchedule.DISTMM_PIPE if overlapping else ContrastiveSchedule.BATCH_SYNC,
    )
    nodes = tuple(Node((t.name,), rank, stage) for t in towers for rank in range(t.dp) for stage in range(t.pp))
    return PlannedTimeline(nodes, pipeline, simulate(pipeline))


def _times(tower: ModuleSpec, plan: StepPlan) -> TowerTimes:
    """Times and activations of a tower, the same on each of its stages."""

    def on_stages(values: I64) -> I64:
        return np.repeat(values[:, None, :], tower.pp, axis=1)

    forward = microbatch_loads(tower, plan) // tower.pp
    held = None
    if tower.memory is not None:
        arrangement, sizes = plan.arrangement(tower.name), item_sizes(tower, plan.samples)
        held = sums_with_padding(tower, arrangement, sizes, plan.num_microbatches) * tower.memory.unit_bytes
    return TowerTimes(
        forward_ns=on_stages(forward),
        backward_ns=on_stages(backward_ns(tower.cost, forward)),
        in_flight=plan.in_flight(tower.name),
        activation_bytes=None if held is None else on_stages(held),
    )


def bound_ns(job: Job, plan: StepPlan) -> int:
    """A time that no arrangement of the step's contrastive batches can beat, under any schedule.

    For every tower: the work of its last stage, evenly spread over the ranks; the way of the smallest possible
    microbatch through the stages before it, there and back; and the interactions, which the last stage runs too.
    """
    layout, towers = contrastive_layout(job.spec.execution), job.spec.execution.modules
    interactions = plan.num_microbatches // layout.microbatches * layout.interaction_ns
    return max(_tower_bound_ns(tower, plan) for tower in towers) + interactions


def _tower_bound_ns(tower: ModuleSpec, plan: StepPlan) -> int:
    """The bound of one tower without interactions. Times of stages are rounded down, once for each microbatch."""
    loads = np.sort(forward_ns(tower.cost, item_sizes(tower, plan.samples)))
    cells, percent = tower.dp * plan.num_microbatches, tower.cost.backward_percent
    total = int(loads.sum()) + cells * tower.cost.microbatch_ns
    forward = max((total - cells * (tower.pp - 1)) // tower.pp, 0)
    backward = max((forward * percent - 99 * cells) // 100, 0)
    least = (int(loads[: len(loads) // cells].sum()) + tower.cost.microbatch_ns) // tower.pp
    way = (tower.pp - 1) * (least + least * percent // 100)
    return -(-(forward + backward) // tower.dp) + way
