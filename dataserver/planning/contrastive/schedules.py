"""Pipelines of towers that meet in an interaction."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from dataserver.planning.pipeline import (
    Operation,
    Pipeline,
    batch_sync_operations,
    chain_edges,
    distmm_operations,
)
from dataserver.planning.samples import I64


class ContrastiveSchedule(StrEnum):
    """What the stages of a tower do around the barrier."""

    BATCH_SYNC = "batch_sync"
    """One group after the other (DISTMM, section 4.3)."""
    DISTMM_PIPE = "distmm_pipe"
    """The next group's forwards fill the barrier's gap (DISTMM, section 4.4)."""


@dataclass(frozen=True, slots=True)
class TowerTimes:
    """Times of one tower, int64 [ranks, stages, microbatches] nanoseconds."""

    forward_ns: I64
    backward_ns: I64


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
    generate = batch_sync_operations if schedule is ContrastiveSchedule.BATCH_SYNC else distmm_operations
    operations: list[list[Operation]] = []
    stage, edges, nodes = [], [], 0
    for tower in towers:
        ranks, stages, _ = tower.forward_ns.shape
        stage.append(np.tile(np.arange(stages), ranks) + len(operations))
        operations += [generate(s, stages, count // groups, groups) for s in range(stages)]
        for _ in range(ranks):
            edges.append(chain_edges(stages, count) + np.array([0, nodes, nodes]))
            nodes += stages
    return Pipeline(
        num_stages=len(operations),
        stage=np.concatenate(stage),
        forward_ns=np.concatenate([t.forward_ns.reshape(-1, count) for t in towers]),
        backward_ns=np.concatenate([t.backward_ns.reshape(-1, count) for t in towers]),
        edges=np.concatenate(edges),
        operations=operations,
        interaction_ns=np.tile(interaction_ns, (nodes, 1)),
    )
