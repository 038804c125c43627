"""The ends of chunks whose rows move by point-to-point messages."""

from collections.abc import Sequence

import torch

from trainclient.exchange.message_header import GRADIENT_KINDS, Kind, MessageType
from trainclient.exchange.message_queue import MessageQueue
from trainclient.exchange.point_to_point import EdgeEnd, P2PReceiver, P2PSender
from trainclient.layouts.interface import ChunkEnds, ProcessSurroundings
from trainclient.modules import TrainedModule, rows_of
from trainclient.topology.process_grid import Chunk, Edge


def chunk_ends(surroundings: ProcessSurroundings, modules: Sequence[TrainedModule]) -> list[ChunkEnds]:
    """The ends of the chunks of a process, over its edges to other processes."""
    chunks = surroundings.process.chunks
    return [_ends(surroundings, chunk, module) for chunk, module in zip(chunks, modules, strict=True)]


def _ends(surroundings: ProcessSurroundings, chunk: Chunk, module: TrainedModule) -> ChunkEnds:
    into = [edge_end(surroundings, edge, -1, module.dtype) for edge in surroundings.topology.into(chunk)]
    out = [edge_end(surroundings, edge, +1, module.dtype) for edge in surroundings.topology.out_of(chunk)]
    return ChunkEnds(
        receiver=P2PReceiver(into, module.device, module.dtype) if into else None,
        sender=P2PSender(out, module.device, module.dtype) if out else None,
    )


def edge_end(surroundings: ProcessSurroundings, edge: Edge, direction: int, dtype: torch.dtype) -> EdgeEnd:
    """This process's end of an edge into its chunk (-1) or out of it (+1)."""
    process, other = surroundings.process, edge.target if direction > 0 else edge.source
    both = surroundings.communicators.edges[str(edge)]
    ranks = surroundings.topology.ranks(other, process.sp if edge.is_straight else 0)
    kind = Kind.ACTIVATIONS if edge.is_straight else rows_of(edge.source.module)
    number = edge.source.number if edge.is_straight else 0
    return EdgeEnd(
        source=edge.source.module.name,
        target=edge.target.module.name,
        forward=MessageQueue(both.forward, ranks, MessageType(kind, number), dtype),
        backward=MessageQueue(both.backward, ranks, MessageType(GRADIENT_KINDS[kind], number), dtype),
        rank=process.rank if edge.is_straight else None,
        returns=edge.returns,
    )
