"""How long the rows of a colocated step take from phase to phase."""

from collections.abc import Mapping, Sequence

import numpy as np

from dataserver.planning.balancing import bin_loads
from dataserver.planning.colocated.options import ColocatedOptions
from dataserver.planning.costs import hop_ns
from dataserver.planning.job import Execution
from dataserver.planning.jobspec import ModuleKind
from dataserver.planning.plan import Routing
from dataserver.planning.samples import I64
from dataserver.planning.simulation import FORWARD, Operations


def phase_hops(execution: Execution, routings: Sequence[Routing], *, least: bool = False) -> dict[str, int]:
    """For each encoder and generator: nanoseconds of the hop between it and the backbone, the same there and back.

    All ranks exchange at once, and each node has one link: the hop lasts as long as the node that sends or takes most
    rows needs. Rows that stay on their node take no time. Where all ranks share a node, links are those of ranks.
    With `least`, as if no row left its node: the latencies.
    """
    found, backbone = dict[str, int](), execution.backbone.name
    for r in routings:
        transfer, rows = execution.transfer(r.source_module, r.target_module), 0 if least else _busiest(execution, r)
        outer = r.target_module if r.source_module == backbone else r.source_module
        found[outer] = int(hop_ns(transfer, np.array(rows)))
    return found


def _busiest(execution: Execution, routing: Routing) -> int:
    """The most rows that one link sends or takes."""
    ranks, size = execution.backbone.dp, execution.options(ColocatedOptions).ranks_per_node
    source, target = (rank // (size if size < ranks else 1) for rank in (routing.source_rank, routing.target_rank))
    moved = np.where(source == target, 0, routing.rows)
    return max(int(bin_loads(moved, link, ranks).max()) for link in (source, target))


def hops_before(execution: Execution, phases: Sequence[Operations], hop: Mapping[str, int]) -> I64:
    """Nanoseconds of the hops before each phase, one after the other, while no rank computes. int64 [phases].

    Phases are those of `programs.step_phases`; `hop` is that of each encoder and generator (`phase_hops`).
    """
    modules, found = execution.by_depth, np.zeros(len(phases), np.int64)
    for number, phase in enumerate(phases):
        module, forward = modules[int(phase.chunk[0])], bool(phase.kind[0] == FORWARD)
        if module.kind is ModuleKind.BACKBONE:  # embeddings of all encoders, or gradients of all generators
            others = execution.of_kind(ModuleKind.ENCODER if forward else ModuleKind.GENERATOR)
            found[number] = sum(hop[m.name] for m in others)
        elif module.kind is ModuleKind.GENERATOR or not forward:  # conditions, or gradients of an encoder
            found[number] = hop[module.name]
    return found
