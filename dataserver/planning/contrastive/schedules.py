"""Pipelines of towers that meet in an interaction."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataserver.planning.jobspec import ContrastiveSchedule
from dataserver.planning.pipeline import (
    Operation,
    Pipeline,
    batch_sync_operations,
    chain_edges,
    distmm_operations,
)
from dataserver.planning.samples import I64


@dataclass(frozen=True, slots=True)
class TowerTimes:
    """What one tower does in a step; all but `in_flight` int64 [ranks, stages, microbatches]."""

    forward_ns: I64
    backward_ns: I64
    in_flight: I64 | None = None
    """int64 [stages]: microbatches that each stage holds at most; by default those of `tower_in_flight`."""
    activation_bytes: I64 | None = None
    """Held by each device of a stage from forward to backward; without it 0."""


def tower_in_flight(num_stages: int, group_size: int, schedule: ContrastiveSchedule, extra: int = 0) -> I64:
    """Microbatches that the stages of a tower hold at most between forward and backward. int64 [stages].

    All of a group, since no backward starts before its barrier. `distmm_pipe` lets as many forwards of the next group
    run ahead as 1F1B begins with, and `extra` more, on all stages but the last (`pipeline.distmm_operations`).
    """
    ahead = np.arange(num_stages - 1, -1, -1)
    if schedule is ContrastiveSchedule.BATCH_SYNC:
        ahead[:] = 0
    ahead[ahead > 0] += extra
    return group_size + ahead


def contrastive_pipeline(towers: Sequence[TowerTimes], interaction_ns: I64, schedule: ContrastiveSchedule) -> Pipeline:
    """Towers side by side: each rank is a chain of stages, all last stages meet in the interaction of every group.

    Args:
        towers: each with its own ranks and stages, all with the same microbatches.
        interaction_ns: int64 [groups]: forward and backward of each group's interaction, features gathered.
        schedule: the operation lists.

    Returns:
        A pipeline whose nodes go by tower, rank and stage.

    Raises:
        ValueError: towers of different numbers of microbatches, or microbatches that do not divide into the groups.
    """
    counts, groups = {t.forward_ns.shape[2] for t in towers}, len(interaction_ns)
    if len(counts) != 1 or not groups or min(counts) % groups:
        raise ValueError(
            f"towers of {sorted(counts)} microbatches and {groups} contrastive groups; all towers need the same "
            "number, a multiple of the groups"
        )
    count = counts.pop()
    operations: list[list[Operation]] = []
    stage, edges, nodes = [], [], 0
    for tower in towers:
        ranks, stages, _ = tower.forward_ns.shape
        stage.append(np.tile(np.arange(stages), ranks) + len(operations))
        operations += _lists(tower, groups, schedule)
        for _ in range(ranks):
            edges.append(chain_edges(stages, count) + np.array([0, nodes, nodes]))
            nodes += stages
    held = [np.zeros_like(t.forward_ns) if t.activation_bytes is None else t.activation_bytes for t in towers]
    return Pipeline(
        num_stages=len(operations),
        stage=np.concatenate(stage),
        forward_ns=np.concatenate([t.forward_ns.reshape(-1, count) for t in towers]),
        backward_ns=np.concatenate([t.backward_ns.reshape(-1, count) for t in towers]),
        edges=np.concatenate(edges),
        operations=operations,
        interaction_ns=np.tile(interaction_ns, (nodes, 1)),
        activation_bytes=np.concatenate([h.reshape(-1, count) for h in held]),
    )


def _lists(tower: TowerTimes, groups: int, schedule: ContrastiveSchedule) -> list[list[Operation]]:
    """The operations of each stage of a tower."""
    _, stages, count = tower.forward_ns.shape
    size = count // groups
    if schedule is ContrastiveSchedule.BATCH_SYNC:
        return [batch_sync_operations(s, stages, size, groups) for s in range(stages)]
    held = tower_in_flight(stages, size, schedule) if tower.in_flight is None else tower.in_flight
    extra = held - tower_in_flight(stages, size, schedule)
    return [distmm_operations(s, stages, size, groups, e) for s, e in enumerate(extra.tolist())]
