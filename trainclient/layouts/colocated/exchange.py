"""Rows of a colocated job move by all-to-alls between the phases of its modules."""

from collections.abc import Sequence

from trainclient.exchange.communicators import Communicators
from trainclient.exchange.message_header import GRADIENT_KINDS, MessageType
from trainclient.layouts.colocated.all_to_all_edge import AllToAllEdge
from trainclient.layouts.colocated.phases import PhaseReceiver, PhaseSender
from trainclient.layouts.interface import ChunkEnds, ProcessSurroundings
from trainclient.modules import TrainedModule, rows_of
from trainclient.topology.process_grid import Edge


def chunk_ends(surroundings: ProcessSurroundings, modules: Sequence[TrainedModule]) -> list[ChunkEnds]:
    """The ends of the chunks of a process; both ends of an edge are in the same one."""
    topology = surroundings.topology
    edges = {edge: _all_to_all_edge(edge, surroundings.communicators) for edge in topology.edges}
    found = []
    for chunk, module in zip(surroundings.process.chunks, modules, strict=True):
        into, out = [edges[e] for e in topology.into(chunk)], [edges[e] for e in topology.out_of(chunk)]
        receiver = PhaseReceiver(into, module.device, module.dtype) if into else None
        sender = PhaseSender(out, module.device, module.dtype) if out else None
        found.append(ChunkEnds(receiver, sender, buffers=tuple(b for b in (sender, receiver) if b is not None)))
    return found


def _all_to_all_edge(edge: Edge, communicators: Communicators) -> AllToAllEdge:
    if communicators.collective is None or communicators.header_collective is None:
        raise TypeError("a rank of colocated modules takes part in no collective")
    kind, names = rows_of(edge.source.module), (edge.source.module.name, edge.target.module.name)
    message_types = MessageType(kind), MessageType(GRADIENT_KINDS[kind])
    return AllToAllEdge(
        names, communicators.collective, communicators.header_collective, message_types, returns=edge.returns
    )
