"""How modules share the devices and the time of a step: one module for each layout that a job can have.

A layout plans steps, knows its baseline, and simulates its plans (`LayoutPlanner`).
"""

from collections.abc import Mapping
from types import MappingProxyType

from dataserver.planning.jobspec import Execution
from dataserver.planning.layouts import colocated, contrastive, grouped, pipelined
from dataserver.planning.layouts.interface import LayoutPlanner, Node, PlannedTimeline

_PLANNERS: Mapping[str, LayoutPlanner] = MappingProxyType(
    {"pipeline": pipelined.PLANNER, "colocated": colocated.PLANNER, "contrastive": contrastive.PLANNER}
)


def layout_planner(execution: Execution) -> LayoutPlanner:
    """The planner of a job's layout."""
    if any(m.sequence_groups is not None for m in execution.modules):
        return grouped.PLANNER
    return _PLANNERS[execution.layout.kind]


__all__ = ["LayoutPlanner", "Node", "PlannedTimeline", "layout_planner"]
