"""Contrastive (CLIP-type) training: towers whose samples all meet in one loss (DISTMM, NSDI 2024).

The loss of a contrastive batch couples all its samples, so its group is a barrier: no sample moves to another group,
and no backward starts before all forwards of the group are done, on all ranks of all towers.
"""

from dataserver.planning.contrastive.groups import (
    GroupedArrangement,
    balance_groups,
    barrier_units,
    contrastive_groups,
    deal_by_size,
    groups_in_order,
    pad_groups,
)
from dataserver.planning.contrastive.memory import distmm_max_batch, pipeline_max_microbatch
from dataserver.planning.contrastive.profiles import tower_profile, with_degrees
from dataserver.planning.contrastive.schedules import TowerTimes, contrastive_pipeline, tower_in_flight
from dataserver.planning.contrastive.towers import (
    TowerChoice,
    TowerCluster,
    TowerDegree,
    TowerPlacement,
    TowerPlan,
    TowerProfile,
    choose_towers,
    place_equally,
    place_in_parallel,
    share_time,
)

__all__ = [
    "GroupedArrangement",
    "TowerChoice",
    "TowerCluster",
    "TowerDegree",
    "TowerPlacement",
    "TowerPlan",
    "TowerProfile",
    "TowerTimes",
    "balance_groups",
    "barrier_units",
    "choose_towers",
    "contrastive_groups",
    "contrastive_pipeline",
    "deal_by_size",
    "distmm_max_batch",
    "groups_in_order",
    "pad_groups",
    "pipeline_max_microbatch",
    "place_equally",
    "place_in_parallel",
    "share_time",
    "tower_in_flight",
    "tower_profile",
    "with_degrees",
]
