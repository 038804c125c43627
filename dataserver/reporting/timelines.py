"""A simulated step as its operations, for everything that shows one."""

from collections import Counter
from dataclasses import dataclass

from dataserver.planning.layouts.interface import Node, PlannedTimeline
from dataserver.planning.simulation import OperationKind, critical_path


@dataclass(frozen=True, slots=True)
class Bar:
    """One operation of one node."""

    kind: OperationKind
    module: str
    """Module of the chunk that it runs; of an interaction, the tower."""
    chunk: int
    """Which of the node's chunks."""
    microbatch: int
    """Microbatch; of an interaction, the contrastive batch."""
    start_ns: int
    end_ns: int
    critical: bool
    """Whether it is on the critical path: shortening anything else makes the step no faster."""


def bars_of(planned: PlannedTimeline) -> list[list[Bar]]:
    """What each node computes, in its order; collectives take no time in plans."""
    lists = planned.pipeline.operations
    critical = {(o.node, o.operation) for o in critical_path(planned.pipeline, planned.timeline)}
    starts, ends = planned.timeline.start_ns.tolist(), planned.timeline.end_ns.tolist()
    found = []
    for node, stage in enumerate(planned.pipeline.stage.tolist()):
        modules = planned.nodes[node].modules
        times = zip(lists[stage], starts[node], ends[node], strict=False)
        found.append(
            [
                Bar(o.kind, modules[o.chunk], o.chunk, o.microbatch, start, end, (node, o) in critical)
                for o, start, end in times
                if o.computes
            ]
        )
    return found


def modules_of(planned: PlannedTimeline) -> list[str]:
    """The modules in the order of the nodes and their chunks."""
    return list(dict.fromkeys(module for node in planned.nodes for module in node.modules))


def owner_of(node: Node) -> str:
    """What a node belongs to: its module, or all that share it."""
    return " + ".join(dict.fromkeys(node.modules))


def labels_of(planned: PlannedTimeline) -> list[str]:
    """What each node is called: module and rank, and the stage where the module has several; rank alone where the
    modules share all ranks."""
    several = {node.modules for node in planned.nodes if node.stage}
    shared = all(len(set(node.modules)) > 1 for node in planned.nodes)
    return [
        f"{'rank' if shared else owner_of(node)} {node.rank}"
        + (f", stage {node.stage}" if node.modules in several else "")
        for node in planned.nodes
    ]


def critical_ns(planned: PlannedTimeline) -> dict[str, int]:
    """Time that the critical path spends in each module, and in interactions where there are any, nanoseconds; in all
    the makespan, less the transfers on the path."""
    spent: Counter[str] = Counter(dict.fromkeys(modules_of(planned), 0))
    for timed in critical_path(planned.pipeline, planned.timeline):
        interaction = timed.operation.kind is OperationKind.INTERACTION
        module = planned.nodes[timed.node].modules[timed.operation.chunk]
        spent["interaction" if interaction else module] += timed.end_ns - timed.start_ns
    return dict(spent)
