"""What the executor reads from a microbatch."""

from dataserver.planning.plan import Routing
from trainclient.client import Batch
from trainclient.parallel.broker import RoutingError, RowBlocks
from trainclient.parallel.messages import Stamp


def stamp_of(batch: Batch) -> Stamp:
    """What the messages of a microbatch are stamped with."""
    return Stamp(batch.plan_hash, batch.step, batch.microbatch)


def outgoing(batch: Batch, source: str, target: str) -> RowBlocks:
    """The blocks that this rank of `source` sends to `target` in the forward pass."""
    routing = _routing(batch, source, target)
    return RowBlocks(routing.target_rank, routing.source_start, routing.rows, routing.source_start)


def incoming(batch: Batch, source: str, target: str) -> RowBlocks:
    """The blocks that this rank of `target` receives from `source` in the forward pass."""
    routing = _routing(batch, source, target)
    return RowBlocks(routing.source_rank, routing.target_start, routing.rows, routing.source_start)


def _routing(batch: Batch, source: str, target: str) -> Routing:
    for routing in batch.routings:
        if (routing.source_module, routing.target_module) == (source, target):
            return routing
    found = [f"{r.source_module} -> {r.target_module}" for r in batch.routings]
    raise RoutingError(f"the view has no routing {source} -> {target}, only {found}; the server planned another job")
