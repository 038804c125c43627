"""Process groups of one process, made once and passed on."""

import os
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
from trainclient.exchange.communicators import Collective, Communicators, EdgeP2P, GroupP2P
from trainclient.exchange.host_staging import HostStaging
from trainclient.exchange.leader_broadcast import LeaderCollective, TorchViewGroup, leader_edges
from trainclient.exchange.lost_ranks import translate_rank_errors
from trainclient.exchange.view_groups import SharedSequences
from trainclient.exchange.wait_times import Waits
from trainclient.topology.device_queues import require_queues, row_members
from trainclient.topology.process_grid import GridProcess, Topology


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """This process, and how it reaches the others."""

    rank: int
    """Global rank of this process."""
    process: GridProcess
    device: torch.device
    world: ProcessGroup
    """All processes: metrics and the norm of the gradients."""
    mesh: DeviceMesh
    """The processes of this module's stage: dimension `dp`, of data-parallel ranks with their shares of sequences, and
    `tp` where tensor parallelism is used."""
    data_parallel: ProcessGroup
    """Dimension `dp` of these: the processes that hold the same parameters."""
    tp_group: TorchViewGroup | None
    """Dimension `tp`; None without tensor parallelism."""
    reading: ProcessGroup | None
    """Group over gloo of the processes that work on the same views as this one, for these alone; None where it has its
    own."""
    control: ProcessGroup
    """All processes over gloo, for data on the CPU."""
    saving: ProcessGroup
    """The same, for checkpoints alone: a thread writes them while the next steps run."""
    communicators: Communicators
    plan_checking: ProcessGroup | None
    """Group over gloo of the processes of `Topology.plan_checked_ranks`; None elsewhere."""
    fetching: Mapping[tuple[int, ...], ProcessGroup]
    """Groups over gloo, by the ranks of the groups that this process may share sequences in: their views alone."""
    waits: Waits
    """Waits for other processes, in the middle of what this one computes."""
    host_staging: HostStaging
    """Which way rows go between processes at present."""


@contextmanager
def process_groups(
    topology: Topology,
    device: torch.device,
    timeout_s: float,
    store: Store | None = None,
    rank: int = -1,
    tied: Sequence[tuple[int, int]] = (),
) -> Iterator[Groups]:
    """Join the other processes.

    After an error nothing is taken down, for that may wait for processes that are gone: the process must just exit.

    Args:
        topology: must have as many processes as were started.
        device: where the tensors of this process live; NCCL on CUDA, gloo elsewhere.
        timeout_s: longest wait for another process in any collective or transfer.
        store: where they find each other; by default, as the next one, torchrun's environment variables name it.
        rank: of this process.
        tied: global ranks of the two processes of each tied parameter, which make a group of their own later.

    Raises:
        TopologyError: on CUDA, a process has more communicators than its device has queues.
    """
    if device.type == "cuda":
        require_queues(topology, os.environ, tied)
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
    mesh, data_parallel, tp_group = _mesh(topology, rank, device, timeout, waits)
    reading = _own(rank, topology.readers, _on_cpus, timeout)
    shared, fetching = _shared_sequences(topology, rank, device, timeout, waits)
    staging = HostStaging(device)
    directions = _edges(topology, rank, staging, timeout)
    edges = {name: EdgeP2P(*both) for name, both in directions.items()}
    of_all = topology.collectives == (tuple(range(topology.world_size)),)
    collective = world if of_all else _own(rank, topology.collectives, dist.new_group, timeout)
    headers = _own(rank, topology.collectives, _on_cpus, timeout) if topology.collective_edges else None
    control = dist.new_group(backend="gloo", timeout=timeout)
    checking = _own(rank, [topology.plan_checked_ranks], _on_cpus, timeout) if topology.plan_checked_ranks else None
    groups = Groups(
        rank=rank,
        process=topology.processes[rank],
        device=device,
        world=world,
        mesh=mesh,
        data_parallel=data_parallel,
        tp_group=tp_group,
        reading=reading,
        control=control,
        saving=dist.new_group(backend="gloo", timeout=timeout),
        communicators=Communicators(
            edges if tp_group is None else leader_edges(edges, tp_group),
            _collective(topology, None if collective is None else GroupCollective(collective, device), tp_group),
            shared,
            None if headers is None else GroupCollective(headers, torch.device("cpu")),
        ),
        plan_checking=checking,
        fetching=fetching,
        waits=waits,
        host_staging=staging,
    )
    with translate_rank_errors("other ranks"):
        connect(topology, directions, rank)
    yield groups
    dist.destroy_process_group()


def _collective(topology: Topology, own: Collective | None, tp_group: TorchViewGroup | None) -> Collective | None:
    """The collective of a process; tensor-parallel ranks that have none share their leader's."""
    if tp_group is None:
        return own
    ranks = next((ranks for ranks in topology.collectives if tp_group.leader in ranks), None)
    exchanging = {rank for several in topology.collectives for rank in several}
    if ranks is None or exchanging.issuperset(dist.get_process_group_ranks(tp_group.group)):
        return own
    return LeaderCollective(own if tp_group.is_leader else None, ranks.index(tp_group.leader), len(ranks), tp_group)


def _mesh(
    topology: Topology, rank: int, device: torch.device, timeout: timedelta, waits: Waits
) -> tuple[DeviceMesh, ProcessGroup, TorchViewGroup | None]:
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
    return mesh, data_parallel, TorchViewGroup(leader, device, tensor_parallel, control, waits)


def _own(
    rank: int, several: Sequence[Sequence[int]], new_group: Callable[..., ProcessGroup | None], timeout: timedelta
) -> ProcessGroup | None:
    """The one of several groups that a process is in. All processes make all of them, in the same order."""
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
    process, pool, fetching = topology.processes[rank], {}, {}
    for group in topology.sequence_groups:
        made, control = dist.new_group(group.members, timeout=timeout), _on_cpus(group.members, timeout)
        views = None if group.is_lasting else _on_cpus(group.members, timeout)
        if control is not None:
            leader = group.members[0]
            pool[group.ranks] = TorchViewGroup(leader, device, made, control, waits, alike=group.is_lasting)
        if views is not None:
            fetching[group.ranks] = views
    return SharedSequences(process.rank, pool) if pool or rank in topology.lockstep_ranks else None, fetching


def _edges(
    topology: Topology, rank: int, staging: HostStaging, timeout: timedelta
) -> dict[str, tuple[GroupP2P, GroupP2P]]:
    """Both directions of the edges of the chunks of this process, by name.

    All processes make the groups of all edges together, in the same order.

    Each direction of each edge has a group, and so under NCCL one communicator. In it a process only sends or only
    receives, in the order of microbatches: what waits there waits for what comes before it in the plan.
    """
    headers, found = dist.new_group(backend="gloo", timeout=timeout), {}
    held = topology.processes[rank].chunks
    for number, edge in enumerate(topology.message_edges):
        pairs = topology.pairs(edge)
        members = row_members(pairs)
        used = (True, edge.returns) if members else (False, False)
        rows = [dist.new_group(members, timeout=timeout) if direction else None for direction in used]
        if edge.source in held or edge.target in held:
            there, back = (GroupP2P(rank, staging, group, headers, 2 * number + i) for i, group in enumerate(rows))
            found[str(edge)] = there, back
    return found


def connect(topology: Topology, edges: Mapping[str, tuple[GroupP2P, GroupP2P]], rank: int) -> None:
    """Connect any two processes that exchange rows, in every direction that they use, edge by edge.

    In the middle of 1F1B, where the first messages of different pairs fall on different waves, the processes could wait
    for each other in a circle (see `GroupP2P.connect`); in this order, the same on all of them, they cannot.
    """
    for edge in topology.message_edges:
        pairs = topology.pairs(edge)
        for back in range(1 + edge.returns):
            routes = [(b, a) for a, b in pairs] if back else pairs
            targets = [target for source, target in routes if source == rank]
            sources = [source for source, target in routes if target == rank]
            if targets or sources:
                edges[str(edge)][back].connect(targets, sources)
