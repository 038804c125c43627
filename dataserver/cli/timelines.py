"""A simulated step as its operations, for everything that shows one."""

from collections import Counter
from dataclasses import dataclass

from dataserver.planning.layouts import PlannedTimeline
from dataserver.planning.pipeline import OperationKind, critical_path


@dataclass(frozen=True, slots=True)
class Bar:
    """One operation of one node."""

    forward: bool
    module: str
    microbatch: int
    start_ns: int
    end_ns: int
    critical: bool
    """Whether it is on the critical path: shortening anything else makes the step no faster."""


def bars_of(planned: PlannedTimeline) -> list[list[Bar]]:
    """The operations of each node in their order."""
    lists = planned.pipeline.lists
    critical = {(o.node, o.operation) for o in critical_path(planned.pipeline, planned.timeline)}
    starts, ends = planned.timeline.start_ns.tolist(), planned.timeline.end_ns.tolist()
    found = []
    for node, stage in enumerate(planned.pipeline.stage.tolist()):
        modules = planned.nodes[node].modules
        times = zip(lists[stage], starts[node], ends[node], strict=False)
        found.append(
            [
                Bar(o.kind is OperationKind.FORWARD, modules[o.chunk], o.microbatch, start, end, (node, o) in critical)
                for o, start, end in times
            ]
        )
    return found


def modules_of(planned: PlannedTimeline) -> list[str]:
    """The modules in pipeline order."""
    return list(dict.fromkeys(module for node in planned.nodes for module in node.modules))


def labels_of(planned: PlannedTimeline) -> list[str]:
    """What each node is called: module and rank, and the stage where the module has several."""
    several = {node.modules for node in planned.nodes if node.stage}
    return [
        f"{' + '.join(dict.fromkeys(node.modules))} {node.rank}"
        + (f", stage {node.stage}" if node.modules in several else "")
        for node in planned.nodes
    ]


def critical_ns(planned: PlannedTimeline) -> dict[str, int]:
    """Time that the critical path spends in each module, nanoseconds; in all the makespan."""
    spent: Counter[str] = Counter(dict.fromkeys(modules_of(planned), 0))
    for operation in critical_path(planned.pipeline, planned.timeline):
        spent[planned.nodes[operation.node].modules[operation.operation.chunk]] += operation.end_ns - operation.start_ns
    return dict(spent)
