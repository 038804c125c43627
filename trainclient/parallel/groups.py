"""Process groups of one process, made once and passed on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainclient.parallel.topology import Place, Topology
from trainclient.parallel.transport import Channel, contact


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """This process and its ways to the others."""

    rank: int
    """Global rank."""
    place: Place
    device: torch.device
    world: ProcessGroup
    """All processes: metrics and the norm of the gradients."""
    data_parallel: ProcessGroup
    """The data-parallel ranks of this module's stage."""
    control: ProcessGroup
    """All processes over gloo: checkpoints, whose collectives carry CPU data."""
    forward: Channel
    """Embeddings, activations and conditions, from stage to stage."""
    backward: Channel
    """Their gradients, the other way. A group of its own: NCCL runs the transfers between two processes of one group
    in the order of their calls, in which the two directions of 1F1B would wait for each other."""


@contextmanager
def process_groups(topology: Topology, device: torch.device, timeout_s: float) -> Iterator[Groups]:
    """Join the other processes, which are found through torchrun's environment variables.

    After an error nothing is taken down, for that may wait for processes that are gone: the process must just exit.

    Args:
        topology: must have as many places as there are processes.
        device: where the tensors of this process live; NCCL on CUDA, gloo elsewhere.
        timeout_s: longest wait for another process in any collective or transfer.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)
    rank, world = dist.get_rank(), dist.group.WORLD
    if world is None:
        raise RuntimeError("torch.distributed has no default process group right after it was made")
    place = topology.places[rank]
    made = {
        ranks: dist.new_group(ranks, timeout=timeout)
        for ranks in (topology.ranks(module, stage) for module, stage in topology.pipeline)
    }
    groups = Groups(
        rank=rank,
        place=place,
        device=device,
        world=world,
        data_parallel=made[topology.ranks(place.module, place.stage)],
        control=dist.new_group(backend="gloo", timeout=timeout),
        forward=Channel(dist.new_group(timeout=timeout), rank, device),
        backward=Channel(dist.new_group(timeout=timeout), rank, device),
    )
    with contact("other ranks"):
        connect(topology, groups)
    yield groups
    dist.destroy_process_group()


def connect(topology: Topology, groups: Groups) -> None:
    """Send one empty message along every pair of neighbours, both ways, pipeline stage by pipeline stage.

    NCCL builds the connection of a pair at its first message, and builds it in both processes at once. In the middle
    of 1F1B, where the first messages of different pairs fall on different waves, the processes could wait for each
    other in a circle; in this order they cannot.
    """
    for stage in range(len(topology.pipeline) - 1):
        at = topology.pipeline_stage(groups.place)
        for channel, sending, receiving in ((groups.forward, stage, stage + 1), (groups.backward, stage + 1, stage)):
            peers = topology.targets(groups.place) if at == stage else topology.sources(groups.place)
            if at == sending:
                for peer in peers:
                    channel.send(peer, torch.zeros(1, dtype=torch.uint8, device=groups.device), microbatch=-1)
            elif at == receiving:
                for peer in peers:
                    channel.receive(peer, 1)
        groups.forward.release()
        groups.backward.release()
