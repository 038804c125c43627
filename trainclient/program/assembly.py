"""Builds what a process runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dataserver.planning.job.spec import JobSpec
from trainclient.exchange.colocated import AllToAllEdge, PhaseReceiver, PhaseSender
from trainclient.exchange.communicators import Communicators
from trainclient.exchange.contrastive import Gathering
from trainclient.exchange.edges import EdgeEnd, P2PReceiver, P2PSender
from trainclient.exchange.interfaces import Buffer, Receiver, Sender
from trainclient.exchange.message_header import Kind, MessageType
from trainclient.exchange.message_queue import MessageQueue
from trainclient.modules import Site, Target, TrainedModule, rows_of
from trainclient.program.clock import Clock
from trainclient.program.contrastive import Interaction
from trainclient.program.interpreter import Interpreter
from trainclient.program.parameters import WHOLE_PARAMETERS, Parameters
from trainclient.program.retrieval import Retrieval
from trainclient.program.runner import ChunkRunner, LossWeights
from trainclient.topology.process_grid import Edge, GridProcess, Topology

_GRADIENTS = {
    Kind.EMBEDDINGS: Kind.EMBEDDING_GRADIENTS,
    Kind.ACTIVATIONS: Kind.ACTIVATION_GRADIENTS,
    Kind.CONDITIONS: Kind.CONDITION_GRADIENTS,
}


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """What one process runs."""

    runners: tuple[ChunkRunner, ...]
    """Runners of its chunks, in the order of its program's modules."""
    interpreter: Interpreter

    @property
    def tensors(self) -> dict[str, tuple[str, ...]]:
        """Names of the tensors that are read from the views of each module."""
        found: dict[str, dict[str, None]] = {}
        for runner in self.runners:
            found.setdefault(runner.site.module.name, {}).update(dict.fromkeys(runner.module.tensors))
        return {module: tuple(names) for module, names in found.items()}

    def loss_sum(self, target: Target) -> Tensor:
        """Sum of this process's loss over its targets in the last step, without weight or denominator.

        A float64 scalar on its device.
        """
        found = torch.zeros_like(self.runners[0].loss_sum)
        return found + sum(runner.loss_sum for runner in self.runners if runner.module.target is target)


def assemble(
    spec: JobSpec,
    topology: Topology,
    process: GridProcess,
    modules: Sequence[tuple[Site, TrainedModule]],
    communicators: Communicators,
    weights: LossWeights,
    clock: Clock,
    retrieval: Retrieval | None = None,
    parameters: Parameters = WHOLE_PARAMETERS,
) -> Machine:
    """What a process runs around its modules.

    Args:
        spec: the job.
        topology: of the job.
        process: which one this is.
        modules: of its chunks, in their order.
        communicators: how it reaches the other processes.
        weights: factors of the losses.
        clock: of this process.
        retrieval: gets the features of towers, if they are to be compared beyond their contrastive batches.
        parameters: of the chunks; by default of modules that hold no shares and sum no gradients.
    """
    all_to_all_edges = {edge: _all_to_all_edge(edge, communicators) for edge in topology.edges if topology.colocated}
    runners = []
    for chunk, (site, module) in zip(process.chunks, modules, strict=True):
        into, out, ends = topology.into(chunk), topology.out_of(chunk), (module.device, module.dtype)
        interaction = None
        if topology.colocated:
            io = _phases([all_to_all_edges[edge] for edge in into], [all_to_all_edges[edge] for edge in out], *ends)
        else:
            arriving, leaving = (
                [_edge_end(topology, process, edge, direction, communicators, module.dtype) for edge in edges]
                for edges, direction in ((into, -1), (out, +1))
            )
            interaction = _interaction(spec, topology, process, communicators, clock, retrieval)
            io = _ChunkIO(
                P2PReceiver(arriving, *ends), P2PSender(leaving, *ends), () if interaction is None else (interaction,)
            )
        used = io.receiver if into else None, io.sender if out else None
        runners.append(
            ChunkRunner(site, module, *used, weights, clock, interaction, communicators.shared, buffers=io.buffers)
        )
    interpreter = Interpreter(spec.execution, topology, process, runners, clock, communicators.shared, parameters)
    return Machine(tuple(runners), interpreter)


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkIO:
    """What a chunk sends and receives with."""

    receiver: Receiver
    sender: Sender
    buffers: tuple[Buffer, ...]


def _phases(
    into: Sequence[AllToAllEdge], out: Sequence[AllToAllEdge], device: torch.device, dtype: torch.dtype
) -> _ChunkIO:
    """What a chunk of colocated modules sends and receives with."""
    receiver, sender = PhaseReceiver(into, device, dtype), PhaseSender(out, device, dtype)
    return _ChunkIO(receiver, sender, (sender, receiver))


def _interaction(
    spec: JobSpec,
    topology: Topology,
    process: GridProcess,
    communicators: Communicators,
    clock: Clock,
    retrieval: Retrieval | None,
) -> Interaction | None:
    """The interactions of a last stage of a tower."""
    if communicators.collective is None or process.modules[0].modality is None:
        return None
    towers = [topology.processes[rank].chunks[-1].module.name for rank in topology.collective_ranks]
    return Interaction(spec, Gathering(communicators.collective, topology.collective_ranks, towers), clock, retrieval)


def _all_to_all_edge(edge: Edge, communicators: Communicators) -> AllToAllEdge:
    if communicators.collective is None or communicators.header_collective is None:
        raise TypeError("a rank of colocated modules takes part in no collective")
    kind, names = rows_of(edge.source.module), (edge.source.module.name, edge.target.module.name)
    message_types = MessageType(kind), MessageType(_GRADIENTS[kind])
    return AllToAllEdge(
        names, communicators.collective, communicators.header_collective, message_types, returns=edge.returns
    )


def _edge_end(
    topology: Topology,
    process: GridProcess,
    edge: Edge,
    direction: int,
    communicators: Communicators,
    dtype: torch.dtype,
) -> EdgeEnd:
    """This process's end of an edge into its chunk (-1) or out of it (+1)."""
    other = edge.target if direction > 0 else edge.source
    both, ranks = communicators.edges[str(edge)], topology.ranks(other, process.sp if edge.is_straight else 0)
    kind = Kind.ACTIVATIONS if edge.is_straight else rows_of(edge.source.module)
    number = edge.source.number if edge.is_straight else 0
    return EdgeEnd(
        source=edge.source.module.name,
        target=edge.target.module.name,
        forward=MessageQueue(both.forward, ranks, MessageType(kind, number), dtype),
        backward=MessageQueue(both.backward, ranks, MessageType(_GRADIENTS[kind], number), dtype),
        rank=process.rank if edge.is_straight else None,
        returns=edge.returns,
    )
