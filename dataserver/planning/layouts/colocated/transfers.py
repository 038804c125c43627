"""How long the rows of a colocated step take from phase to phase."""

from collections.abc import Mapping, Sequence

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.balancing import bin_loads
from dataserver.planning.costs.model import transfer_ns
from dataserver.planning.job.fields import ModuleKind
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.colocated.options import ColocatedOptions
from dataserver.planning.layouts.colocated.programs import first_pass
from dataserver.planning.plan.plan import ArrangedStep, Routing, round_size
from dataserver.planning.simulation import FORWARD, Operations


def phase_transfers(execution: Execution, plan: ArrangedStep, *, least: bool = False) -> dict[str, I64]:
    """For each encoder and generator int64 [rounds]: nanoseconds of the transfer between it and the backbone.

    It is the same there and back. All ranks exchange at once, and each node has one link: the transfer lasts as long as
    the node that sends or takes most rows needs. Rows that stay on their node take no time. Where all ranks share a
    node, links are those of ranks. With `least`, as if no row left its node: the latencies.
    """
    size = round_size(plan.schedules, plan.num_microbatches)
    found, backbone, rounds = dict[str, I64](), execution.backbone.name, -(-plan.num_microbatches // size)
    for r in plan.routings:
        transfer = execution.transfer(r.source_module, r.target_module)
        outer = r.target_module if r.source_module == backbone else r.source_module
        found[outer] = transfer_ns(
            transfer, np.zeros(rounds, np.int64) if least else _busiest(execution, r, size, rounds)
        )
    return found


def _busiest(execution: Execution, routing: Routing, size: int, rounds: int) -> I64:
    """The most rows that one link sends or takes in each round. int64 [rounds]."""
    ranks, node = execution.backbone.dp, execution.options(ColocatedOptions).ranks_per_node
    source, target = (rank // (node if node < ranks else 1) for rank in (routing.source_rank, routing.target_rank))
    moved, before = np.where(source == target, 0, routing.rows), routing.source_microbatch // size * ranks
    ends = [bin_loads(moved, before + link, rounds * ranks).reshape(rounds, ranks) for link in (source, target)]
    found: I64 = np.maximum(*ends).max(axis=1)
    return found


def transfers_before(
    execution: Execution, phases: Sequence[Operations], size: int, transfers: Mapping[str, I64]
) -> I64:
    """Nanoseconds of the transfers before each phase, one after the other, while no rank computes. int64 [phases].

    Phases are those of `programs.step_phases` in rounds of `size` microbatches; `transfers` those of each encoder and
    generator (`phase_transfers`).
    """
    modules, found = execution.by_depth, np.zeros(len(phases), np.int64)
    for number, phase in enumerate(phases):
        yield_point()
        first = first_pass(phase)
        module, forward = modules[int(phase.chunk[0])], bool(phase.kind[first] == FORWARD)
        transfer = {name: int(of_rounds[phase.microbatch[first] // size]) for name, of_rounds in transfers.items()}
        if module.kind is ModuleKind.BACKBONE:  # embeddings of all encoders, or gradients of all generators
            others = execution.of_kind(ModuleKind.ENCODER if forward else ModuleKind.GENERATOR)
            found[number] = sum(transfer[m.name] for m in others)
        elif module.kind is ModuleKind.GENERATOR or not forward:  # conditions, or gradients of an encoder
            found[number] = transfer[module.name]
    return found
