"""Sequences spread over sequence-parallel groups of different degrees (FlexSP, arXiv 2412.01523)."""

from dataserver.planning.sequence_parallel.baselines import (
    best_homogeneous_plan,
    homogeneous_plan,
    searched_homogeneous_plan,
)
from dataserver.planning.sequence_parallel.compositions import group_compositions
from dataserver.planning.sequence_parallel.costs import (
    A100_CLUSTER,
    PROFILES,
    Cluster,
    GroupCosts,
    ModelProfile,
    group_costs,
    usable_lengths,
)
from dataserver.planning.sequence_parallel.plan import GroupedMicrobatch, SequenceGroup, SequencePlan
from dataserver.planning.sequence_parallel.planner import plan_groups
from dataserver.planning.sequence_parallel.search import Budget

__all__ = [
    "A100_CLUSTER",
    "PROFILES",
    "Budget",
    "Cluster",
    "GroupCosts",
    "GroupedMicrobatch",
    "ModelProfile",
    "SequenceGroup",
    "SequencePlan",
    "best_homogeneous_plan",
    "group_compositions",
    "group_costs",
    "homogeneous_plan",
    "plan_groups",
    "searched_homogeneous_plan",
    "usable_lengths",
]
