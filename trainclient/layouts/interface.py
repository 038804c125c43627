"""What a layout's `exchange` is asked for: the ends of all that a process sends and receives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dataserver.planning.job.spec import JobSpec
from trainclient.exchange.communicators import Communicators
from trainclient.exchange.gathered_features import GatheredFeatures
from trainclient.exchange.sender_receiver import Buffer, Receiver, Sender
from trainclient.layouts.registry import layout_part
from trainclient.modules import TrainedModule
from trainclient.program.clock import Clock
from trainclient.program.interaction import Interaction
from trainclient.topology.process_grid import GridProcess, Topology


@dataclass(frozen=True, slots=True, eq=False)
class ProcessSurroundings:
    """A process among the others of its job."""

    spec: JobSpec
    topology: Topology
    process: GridProcess
    communicators: Communicators
    """How it reaches the others."""
    clock: Clock
    observe: Callable[[GatheredFeatures], None] | None = None
    """Gets the features of every contrastive batch, if they are to be compared with those of others."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkEnds:
    """What one chunk receives and sends with."""

    receiver: Receiver | None = None
    """None where no edge leads into the chunk."""
    sender: Sender | None = None
    """None where no edge leads out of it."""
    interaction: Interaction | None = None
    """What makes a loss of its features."""
    buffers: tuple[Buffer, ...] = ()
    """What the exchanges of its program flush."""


ChunkEndsMaker = Callable[[ProcessSurroundings, Sequence[TrainedModule]], Sequence[ChunkEnds]]
"""Makes the ends of all chunks of a process, whose modules are given in the order of the chunks."""


def chunk_ends_of(surroundings: ProcessSurroundings, modules: Sequence[TrainedModule]) -> Sequence[ChunkEnds]:
    """The ends of the chunks of a process, as the job's layout makes them."""
    make: ChunkEndsMaker = layout_part(surroundings.spec.execution.layout.kind, "exchange").chunk_ends
    return make(surroundings, modules)
