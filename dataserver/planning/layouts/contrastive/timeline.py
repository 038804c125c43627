"""The simulation of a contrastive plan, and its lower bound."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64
from dataserver.planning.costs.model import backward_ns, forward_ns, transfer_ns
from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import Execution, JobSpec
from dataserver.planning.layouts.contrastive.options import ContrastiveOptions
from dataserver.planning.layouts.contrastive.programs import programs
from dataserver.planning.layouts.interface import Node, PlannedTimeline
from dataserver.planning.plan.expectation import held_units, item_sizes, microbatch_loads
from dataserver.planning.plan.plan import ArrangedStep, StepPlan
from dataserver.planning.simulation import Operations, Pipeline, chain_edges, simulate


@dataclass(frozen=True, slots=True)
class TowerTimes:
    """What one tower does in a step, int64 [ranks, stages, microbatches] each."""

    forward_ns: I64
    backward_ns: I64
    activation_bytes: I64
    """Held by each device of a stage from forward to backward."""
    transfer_ns: I64
    """int64 [ranks, microbatches]: of each transfer between two stages, there and back."""


def contrastive_pipeline(
    towers: Sequence[TowerTimes], interaction_ns: I64, operations: Sequence[Operations]
) -> Pipeline:
    """Towers side by side: each rank is a chain of stages, all last stages meet in the interaction of every batch.

    Args:
        towers: each with its own ranks and stages, all with the same microbatches.
        interaction_ns: int64 [batches]: forward and backward of each batch's interaction, features gathered.
        operations: of each stage of each tower (`programs.programs`).

    Returns:
        A pipeline whose nodes go by tower, rank and stage.
    """
    count = towers[0].forward_ns.shape[2]
    stage, edges, transfers, stages_before, nodes = [], [], list[I64](), 0, 0
    for tower in towers:
        ranks, stages, _ = tower.forward_ns.shape
        stage.append(np.tile(np.arange(stages), ranks) + stages_before)
        stages_before += stages
        for _ in range(ranks):
            edges.append(chain_edges(stages, count) + np.array([0, nodes, nodes]))
            nodes += stages
        transfers.append(np.repeat(tower.transfer_ns, stages - 1))
    return Pipeline(
        num_stages=stages_before,
        stage=np.concatenate(stage),
        forward_ns=np.concatenate([t.forward_ns.reshape(-1, count) for t in towers]),
        backward_ns=np.concatenate([t.backward_ns.reshape(-1, count) for t in towers]),
        edges=np.concatenate(edges),
        operations=operations,
        transfer_ns=np.concatenate(transfers),
        interaction_ns=np.tile(interaction_ns, (nodes, 1)),
        activation_bytes=np.concatenate([t.activation_bytes.reshape(-1, count) for t in towers]),
    )


def timeline(spec: JobSpec, plan: ArrangedStep) -> PlannedTimeline:
    """Simulate a plan: every rank of every stage of every tower, joined by the interactions."""
    layout, towers = spec.execution.options(ContrastiveOptions), spec.execution.modules
    batches = plan.num_microbatches // layout.microbatches
    pipeline = contrastive_pipeline(
        [_times(spec.execution, tower, plan) for tower in towers],
        np.full(batches, layout.interaction_ns),
        [p.operations for p in programs(spec.execution, plan.schedules, plan.num_microbatches)],
    )
    nodes = tuple(Node((t.name,), rank, stage) for t in towers for rank in range(t.dp) for stage in range(t.pp))
    return PlannedTimeline(nodes, pipeline, simulate(pipeline))


def _times(execution: Execution, tower: ModuleSpec, plan: ArrangedStep) -> TowerTimes:
    """Times and activations of a tower, the same on each of its stages, and the transfers between them."""

    def on_stages(values: I64) -> I64:
        return np.repeat(values[:, None, :], tower.pp, axis=1)

    forward = microbatch_loads(tower, plan) // tower.pp
    held, unit_bytes = held_units(tower, plan), 0 if tower.memory is None else tower.memory.unit_bytes
    return TowerTimes(
        forward_ns=on_stages(forward),
        backward_ns=on_stages(backward_ns(tower.cost, forward)),
        activation_bytes=on_stages(held * unit_bytes),
        transfer_ns=transfer_ns(execution.transfer(tower.name, tower.name), held),
    )


def bound_ns(job: Job, plan: StepPlan) -> int:
    """A time that no arrangement of the step's contrastive batches can beat, under any schedule.

    For every tower: the work of its last stage, evenly spread over the ranks; the way of the smallest possible
    microbatch through the stages before it, there and back, with its transfers; and the interactions, which the last
    stage runs too.
    """
    execution = job.spec.execution
    layout, towers = execution.options(ContrastiveOptions), execution.modules
    interactions = plan.num_microbatches // layout.microbatches * layout.interaction_ns
    return max(_tower_bound_ns(execution, tower, plan) for tower in towers) + interactions


def _tower_bound_ns(execution: Execution, tower: ModuleSpec, plan: StepPlan) -> int:
    """The bound of one tower without interactions. Times of stages are rounded down, once for each microbatch."""
    sizes = np.sort(item_sizes(tower, plan.samples))
    loads = forward_ns(tower.cost, sizes)
    count, percent = tower.dp * plan.num_microbatches, tower.cost.backward_percent
    total = int(loads.sum()) + count * tower.cost.microbatch_ns
    forward = max((total - count * (tower.pp - 1)) // tower.pp, 0)
    backward = max((forward * percent - 99 * count) // 100, 0)
    least = (int(loads[: len(loads) // count].sum()) + tower.cost.microbatch_ns) // tower.pp
    transfer = int(transfer_ns(execution.transfer(tower.name, tower.name), sizes[: len(sizes) // count].sum()))
    way = (tower.pp - 1) * (least + least * percent // 100 + (2 if tower.runs_backward else 1) * transfer)
    return -(-(forward + backward) // tower.dp) + way
