"""Process groups of one process, made once and passed on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from trainclient.exchange.all_to_all import GroupCollective
from trainclient.exchange.grouped import SharedSequences
from trainclient.exchange.peers import GroupPeers, PeerCollective, shared_ways
from trainclient.exchange.transport import Channel, Channels, Collective, Directions, GroupChannel, Message, contact
from trainclient.exchange.waiting import Waits
from trainclient.topology.places import Place, Topology


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """This process and its ways to the others."""

    rank: int
    """Global rank."""
    place: Place
    device: torch.device
    world: ProcessGroup
    """All processes: metrics and the norm of the gradients."""
    mesh: DeviceMesh
    """The processes of this module's stage: dimension `dp`, of data-parallel ranks with their shares of sequences, and
    `tp` where it has peers."""
    data_parallel: ProcessGroup
    """Dimension `dp` of these: the processes that hold the same parameters."""
    peers: GroupPeers | None
    """Dimension `tp`; None where this process has no peers."""
    reading: ProcessGroup | None
    """Over gloo: the processes that work on the same views as this one, for these alone; None where it has its own."""
    control: ProcessGroup
    """All processes over gloo, for data on the CPU."""
    saving: ProcessGroup
    """The same, for checkpoints alone: a thread writes them while the next steps run."""
    channels: Channels
    agreeing: ProcessGroup | None
    """Over gloo: processes that exchange rows by collectives within a step; None elsewhere."""
    fetching: Mapping[tuple[int, ...], ProcessGroup]
    """Over gloo, by the ranks of the groups that this process may share sequences in: their views alone."""
    waits: Waits
    """For other processes, in the middle of what this one computes."""


@contextmanager
def process_groups(
    topology: Topology, device: torch.device, timeout_s: float, store: Store | None = None, rank: int = -1
) -> Iterator[Groups]:
    """Join the other processes.

    After an error nothing is taken down, for that may wait for processes that are gone: the process must just exit.

    Args:
        topology: must have as many places as there are processes.
        device: where the tensors of this process live; NCCL on CUDA, gloo elsewhere.
        timeout_s: longest wait for another process in any collective or transfer.
        store: where they find each other; by default, as the next one, torchrun's environment variables name it.
        rank: of this process.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend,
        timeout=timeout,
        store=store,
        rank=rank,
        world_size=-1 if store is None else topology.world_size,
        device_id=device if device.type == "cuda" else None,
    )
    rank, world = dist.get_rank(), dist.group.WORLD
    if world is None:
        raise RuntimeError("torch.distributed has no default process group right after it was made")
    waits = Waits(device)
    mesh, data_parallel, peers = _mesh(topology, rank, device, timeout, waits)
    reading = _own(rank, topology.readers, _on_cpus, timeout)
    shared, fetching = _shared_sequences(topology, rank, device, timeout, waits)
    ways = _ways(topology, rank, device, timeout)
    meeting = topology.together
    together = world if len(meeting) == len(topology.places) else dist.new_group(meeting, timeout=timeout)
    if topology.colocated and peers is not None:
        together = data_parallel
    headers = _on_cpus(dist.get_process_group_ranks(together), timeout) if topology.colocated else None
    control = dist.new_group(backend="gloo", timeout=timeout)
    in_step = _on_cpus(topology.in_step, timeout) if topology.in_step else None
    groups = Groups(
        rank=rank,
        place=topology.places[rank],
        device=device,
        world=world,
        mesh=mesh,
        data_parallel=data_parallel,
        peers=peers,
        reading=reading,
        control=control,
        saving=dist.new_group(backend="gloo", timeout=timeout),
        channels=Channels(
            ways if peers is None else shared_ways(ways, peers),
            _collective(topology, GroupCollective(together, device) if rank in meeting else None, peers),
            shared,
            None if headers is None else GroupCollective(headers, torch.device("cpu")),
        ),
        agreeing=control if topology.colocated else in_step if rank in topology.in_step else None,
        fetching=fetching,
        waits=waits,
    )
    with contact("other ranks"):
        connect(topology, ways, rank)
    yield groups
    dist.destroy_process_group()


def _collective(topology: Topology, own: Collective | None, peers: GroupPeers | None) -> Collective | None:
    """How a process meets others at once; peers of towers share what their first one gets."""
    meeting = topology.together
    if peers is None or topology.colocated or peers.leader not in meeting:
        return own
    return PeerCollective(own if peers.leads else None, meeting.index(peers.leader), len(meeting), peers)


def _mesh(
    topology: Topology, rank: int, device: torch.device, timeout: timedelta, waits: Waits
) -> tuple[DeviceMesh, ProcessGroup, GroupPeers | None]:
    """The mesh of a process and its dimensions. All processes make all groups, in the same order."""
    rows = [row for stage in topology.stages for row in stage if len(row) > 1]
    columns = [column for stage in topology.stages for column in zip(*stage, strict=True)]
    data_parallel = _own(rank, columns, dist.new_group, timeout)
    tensor_parallel, control = _own(rank, rows, dist.new_group, timeout), _own(rank, rows, _on_cpus, timeout)
    if data_parallel is None:
        raise RuntimeError(f"global rank {rank} is in no stage of the job")
    if tensor_parallel is None or control is None:
        return DeviceMesh.from_group(data_parallel, device.type, mesh_dim_names=("dp",)), data_parallel, None
    stage = next(stage for stage in topology.stages if any(rank in row for row in stage))
    both = [data_parallel, tensor_parallel]
    mesh = DeviceMesh.from_group(both, device.type, torch.tensor(stage), mesh_dim_names=("dp", "tp"))
    leader = next(row[0] for row in stage if rank in row)
    return mesh, data_parallel, GroupPeers(leader, device, tensor_parallel, control, waits)


def _own(
    rank: int, several: Sequence[Sequence[int]], new_group: Callable[..., ProcessGroup | None], timeout: timedelta
) -> ProcessGroup | None:
    """Of several groups the one that a process is in. All processes make all of them, in the same order."""
    made = [(ranks, new_group(ranks, timeout=timeout)) for ranks in several]
    return next((group for ranks, group in made if rank in ranks), None)


def _on_cpus(ranks: Sequence[int], timeout: timedelta) -> ProcessGroup | None:
    """A group over gloo, which its members make alone; None on others.

    These would split NCCL's communicator in vain: for that they need all processes, and the members take no part.
    Members must be in equally many groups before, since torch names it by their number.
    """
    group: ProcessGroup | None = dist.new_group(
        list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True
    )
    return group


def _shared_sequences(
    topology: Topology, rank: int, device: torch.device, timeout: timedelta, waits: Waits
) -> tuple[SharedSequences | None, dict[tuple[int, ...], ProcessGroup]]:
    """The groups that this process may share sequences in, and those over which it shares their views.

    All processes make all groups, in the same order.
    """
    place, pool, fetching = topology.places[rank], {}, {}
    for group in topology.sequence_groups:
        made, control = dist.new_group(group.members, timeout=timeout), _on_cpus(group.members, timeout)
        views = None if group.is_lasting else _on_cpus(group.members, timeout)
        if control is not None:
            leader = group.members[0]
            pool[group.ranks] = GroupPeers(leader, device, made, control, waits, alike=group.is_lasting)
        if views is not None:
            fetching[group.ranks] = views
    return SharedSequences(place.rank, pool) if pool or rank in topology.in_step else None, fetching


def _ways(topology: Topology, rank: int, device: torch.device, timeout: timedelta) -> dict[str, Directions]:
    """The channels of the chunks of this process; all processes make the groups of all ways together, in the same
    order.

    Each direction of each way has a group, and so under NCCL one communicator. In it a process only sends or only
    receives, in the order of microbatches: what waits there waits for what comes before it in the plan.
    """
    stamps, found = dist.new_group(backend="gloo", timeout=timeout), {}
    held = topology.places[rank].chunks
    for number, way in enumerate(() if topology.colocated else topology.ways):
        pairs = topology.pairs(way)
        members = sorted({rank for pair in pairs if pair[0] != pair[1] for rank in pair})
        used = (True, way.returns) if members else (False, False)
        rows = [dist.new_group(members, timeout=timeout) if direction else None for direction in used]
        if way.source in held or way.target in held:
            ends = (GroupChannel(rank, device, group, stamps, 2 * number + back) for back, group in enumerate(rows))
            found[str(way)] = Directions(*ends)
    return found


def connect(topology: Topology, ways: Mapping[str, Directions], rank: int) -> None:
    """Send one row between any two processes that exchange rows, in every direction that they use, a way at a time.

    NCCL builds the connection of a pair at its first message, and builds it in both processes at once. In the middle
    of 1F1B, where the first messages of different pairs fall on different waves, the processes could wait for each
    other in a circle; in this order, the same on all of them, they cannot. Colocated modules have no pairs: their rows
    cross by collectives.
    """
    if topology.colocated:
        return
    for way in topology.ways:
        pairs = topology.pairs(way)
        for hops in (pairs, [(b, a) for a, b in pairs] if way.returns else []):
            sent = [target for source, target in hops if source == rank]
            taken = [source for source, target in hops if target == rank]
            if sent or taken:
                channels = ways[str(way)]
                channel = channels.forward if hops is pairs else channels.backward
                departure = channel.send([_empty(peer, channel) for peer in sent], microbatch=-1)
                arrival = channel.post([_empty(peer, channel) for peer in taken], microbatch=-1)
                arrival.wait_stamps()
                arrival.wait_rows()
                departure.wait()


def _empty(peer: int, channel: Channel) -> Message:
    return Message(peer, torch.zeros(1, dtype=torch.uint8), channel.empty(1, 1, torch.uint8))
