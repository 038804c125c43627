"""From a place in the topology to what runs there."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dataserver.planning.job.spec import JobSpec
from trainclient.exchange.colocated import Crossing, PhaseInlet, PhaseOutlet
from trainclient.exchange.contrastive import Gathering
from trainclient.exchange.links import Link
from trainclient.exchange.messages import Kind, Lane
from trainclient.exchange.pipelined import Inlet, Joint, Outlet
from trainclient.exchange.sides import Collecting, Entry, Exit
from trainclient.exchange.transport import Channels
from trainclient.modules import Site, Target, TrainedModule, rows_of
from trainclient.program.clock import Clock
from trainclient.program.contrastive import Interaction
from trainclient.program.interpreter import Interpreter
from trainclient.program.parameters import NOTHING_HELD, Parameters
from trainclient.program.retrieval import Retrieval
from trainclient.program.runner import ChunkRunner, LossWeights
from trainclient.topology.places import Place, Topology, Way

_GRADIENTS = {
    Kind.EMBEDDINGS: Kind.EMBEDDING_GRADIENTS,
    Kind.ACTIVATIONS: Kind.ACTIVATION_GRADIENTS,
    Kind.CONDITIONS: Kind.CONDITION_GRADIENTS,
}


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """What one process runs."""

    runners: tuple[ChunkRunner, ...]
    """Of its chunks, in the order of its program's modules."""
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
    place: Place,
    modules: Sequence[tuple[Site, TrainedModule]],
    channels: Channels,
    weights: LossWeights,
    clock: Clock,
    retrieval: Retrieval | None = None,
    parameters: Parameters = NOTHING_HELD,
) -> Machine:
    """What a process runs around its modules.

    Args:
        spec: the job.
        topology: of the job.
        place: of this process.
        modules: of its chunks, in their order.
        channels: to the other processes.
        weights: factors of the losses.
        clock: of this process.
        retrieval: gets the features of towers, if they are to be compared beyond their contrastive batches.
        parameters: of the chunks; by default of modules that hold no shares and sum no gradients.
    """
    crossings = {way: _crossing(way, channels) for way in topology.ways if topology.colocated}
    runners = []
    for chunk, (site, module) in zip(place.chunks, modules, strict=True):
        into, out, ends = topology.into(chunk), topology.out_of(chunk), (module.device, module.dtype)
        meeting = None
        if topology.colocated:
            sides = _phases([crossings[way] for way in into], [crossings[way] for way in out], *ends)
        else:
            arriving, leaving = (
                [_joint(topology, place, way, direction, channels, module.dtype) for way in ways]
                for ways, direction in ((into, -1), (out, +1))
            )
            meeting = _interaction(spec, topology, place, channels, clock, retrieval)
            sides = _Sides(Inlet(arriving, *ends), Outlet(leaving, *ends), () if meeting is None else (meeting,))
        used = sides.entry if into else None, sides.exit if out else None
        runners.append(
            ChunkRunner(site, module, *used, weights, clock, meeting, channels.shared, exchanged=sides.exchanged)
        )
    interpreter = Interpreter(spec.execution, topology, place, runners, clock, channels.shared, parameters)
    return Machine(tuple(runners), interpreter)


@dataclass(frozen=True, slots=True, eq=False)
class _Sides:
    """Of a chunk."""

    entry: Entry
    exit: Exit
    exchanged: tuple[Collecting, ...]


def _phases(into: Sequence[Crossing], out: Sequence[Crossing], device: torch.device, dtype: torch.dtype) -> _Sides:
    """The sides of a chunk of colocated modules."""
    inlet, outlet = PhaseInlet(into, device, dtype), PhaseOutlet(out, device, dtype)
    return _Sides(inlet, outlet, (outlet, inlet))


def _interaction(
    spec: JobSpec, topology: Topology, place: Place, channels: Channels, clock: Clock, retrieval: Retrieval | None
) -> Interaction | None:
    """The interactions of a last stage of a tower."""
    if channels.together is None or place.modules[0].modality is None:
        return None
    towers = [topology.places[rank].chunks[-1].module.name for rank in topology.together]
    return Interaction(spec, Gathering(channels.together, topology.together, towers), clock, retrieval)


def _crossing(way: Way, channels: Channels) -> Crossing:
    if channels.together is None or channels.headers is None:
        raise TypeError("a rank of colocated modules takes part in no collective")
    kind, names = rows_of(way.source.module), (way.source.module.name, way.target.module.name)
    lanes = Lane(kind), Lane(_GRADIENTS[kind])
    return Crossing(names, channels.together, channels.headers, lanes, returns=way.returns)


def _joint(topology: Topology, place: Place, way: Way, direction: int, channels: Channels, dtype: torch.dtype) -> Joint:
    """This process's end of a way that leads to its chunk (-1) or away from it (+1)."""
    other = way.target if direction > 0 else way.source
    both, peers = channels.ways[str(way)], topology.ranks(other, place.sp if way.is_straight else 0)
    kind = Kind.ACTIVATIONS if way.is_straight else rows_of(way.source.module)
    number = way.source.number if way.is_straight else 0
    return Joint(
        source=way.source.module.name,
        target=way.target.module.name,
        forward=Link(both.forward, peers, Lane(kind, number), dtype),
        backward=Link(both.backward, peers, Lane(_GRADIENTS[kind], number), dtype),
        peer=place.rank if way.is_straight else None,
        returns=way.returns,
    )
