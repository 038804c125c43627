"""The grid of processes: the part of a module that each global rank holds, and the edges between parts.

A module is cut into *chunks*, consecutive shares of its layers: one for each stage, or several where they are
interleaved. Chunks are the nodes of a graph, and the rows that move between them its *edges*; nothing here assumes
that it is a chain. A process holds one data-parallel rank of the chunks of one stage; of all modules where they are
colocated.

Ranks are dealt module by module in the order of the job. Within a module the data-parallel rank comes first, then the
stage, so that the stages of one pipeline are neighbours and share a node, then which share of its sequences (sp), then
the tensor-parallel rank, so that these are next to each other. A tensor-parallel group works on the same rows, and its
first rank, the leader, exchanges them with other processes. Colocated modules all have the same ranks.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Self

from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.job.spec import Execution, JobSpec
from trainclient.topology.support import TopologyError, require_supported


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive layers of a module; all of them where there is one."""

    module: ModuleSpec
    number: int
    """Position among the module's chunks, in the order in which samples pass them."""
    count: int
    """Number of chunks of the module."""

    @property
    def is_first(self) -> bool:
        """Whether the module's inputs enter here."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether the module's outputs leave from here."""
        return self.number == self.count - 1

    def __str__(self) -> str:
        return f"{self.module.name}.{self.number}"


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge: rows from one chunk to another, and their gradients back where the plan has any."""

    source: Chunk
    target: Chunk

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"

    @property
    def returns(self) -> bool:
        """Whether gradients come back: not to a module that runs no backward."""
        return self.source.module.runs_backward

    @property
    def is_straight(self) -> bool:
        """Whether every rank hands all rows to the same rank of the next chunk; otherwise routings say which."""
        return self.source.module == self.target.module


@dataclass(frozen=True, slots=True)
class GridProcess:
    """One process: its coordinates in the grid, and what it holds."""

    chunks: tuple[Chunk, ...]
    """Chunks that it holds, in the order of its program's modules; an operation names one by its position."""
    rank: int
    """Data-parallel rank within the module."""
    stage: int
    """Pipeline stage within the module."""
    tp: int = 0
    """Tensor-parallel rank."""
    sp: int = 0
    """Which share of each sequence's tokens it computes."""

    @property
    def is_leader(self) -> bool:
        """Whether it is the first of the processes that work on the same views."""
        return self.tp == self.sp == 0

    @property
    def modules(self) -> tuple[ModuleSpec, ...]:
        """The modules whose views it reads."""
        return tuple(dict.fromkeys(chunk.module for chunk in self.chunks))

    def __str__(self) -> str:
        first = self.modules[0]
        which = (("stage", self.stage, first.pp), ("share", self.sp, first.sp), ("tp rank", self.tp, first.tp))
        found = "".join(f" {what} {number}" for what, number, degree in which if degree > 1)
        return f"{_together(self.modules)} rank {self.rank}{found}"


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Processes that may share the sequences of a microbatch, each with a part of their tokens."""

    ranks: tuple[int, ...]
    """Data-parallel ranks within their module."""
    members: tuple[int, ...]
    """Global ranks."""

    @property
    def is_lasting(self) -> bool:
        """Whether they share every microbatch: those of one rank (sp)."""
        return len(self.ranks) == 1


@dataclass(frozen=True, slots=True)
class Topology:
    """All processes of a job, and the graph between the chunks that they hold."""

    processes: tuple[GridProcess, ...]
    """All processes by global rank."""
    edges: tuple[Edge, ...]
    """The edges of the graph; those into one chunk in the order of the job."""
    group_degrees: tuple[int, ...] = ()
    """Degrees of the groups of backbone ranks that may share the sequences of a microbatch, ascending; none where every
    rank has its own."""

    @classmethod
    def of(cls, spec: JobSpec) -> Self:
        """The processes of a job.

        Raises:
            TopologyError: the job asks for a parallelism that this trainer does not have.
        """
        require_supported(spec.execution)
        execution = spec.execution
        chunks = {m.name: _chunks(m, execution) for m in execution.modules}
        deal = _all_modules_each if execution.layout.shares_ranks else _one_module_each
        return cls(tuple(deal(execution, chunks)), tuple(_edges(execution, chunks)), execution.layout.group_degrees)

    @property
    def colocated(self) -> bool:
        """Whether modules share their processes, and so run in phases."""
        return any(len(process.modules) > 1 for process in self.processes)

    @property
    def collective_ranks(self) -> tuple[int, ...]:
        """Global ranks of the processes that exchange by collectives.

        The lockstep ranks where there are any; the tensor-parallel leaders of the last stages of towers; otherwise all.
        """
        if self.group_degrees:
            return self.lockstep_ranks
        return tuple(
            rank
            for rank, process in enumerate(self.processes)
            if not process.chunks[-1].module.makes_features or (process.chunks[-1].is_last and process.tp == 0)
        )

    @property
    def lockstep_ranks(self) -> tuple[int, ...]:
        """Global ranks of a backbone whose ranks share sequences: each pass begins for all of them together, since they
        gather parameters for it. None elsewhere."""
        of_backbone = (p.chunks[0].module.holds_samples for p in self.processes if self.group_degrees)
        return tuple(rank for rank, found in enumerate(of_backbone) if found)

    @property
    def sequence_groups(self) -> tuple[SequenceGroup, ...]:
        """Every group of several processes that may share sequences: ranks of the backbone, or those of one rank."""
        members, several = self.lockstep_ranks, [degree for degree in self.group_degrees if degree > 1]
        runs = [range(first, first + n) for n in several for first in range(0, len(members), n)]
        of_ranks = [SequenceGroup(tuple(run), tuple(members[rank] for rank in run)) for run in runs]
        alike = self._alike(lambda process: (process.chunks, process.rank, process.tp))
        return (
            *of_ranks,
            *(SequenceGroup((self.processes[found[0]].rank,), found) for found in alike if len(found) > 1),
        )

    @property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Global ranks of the processes that work on the same views, where they are several."""
        alike = self._alike(lambda process: (process.chunks, process.rank))
        return tuple(found for found in alike if len(found) > 1)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return len(self.processes)

    def require_world_size(self, found: int) -> None:
        """Raise TopologyError, with the command to run, unless there are exactly as many processes as the job needs."""
        if found == self.world_size:
            return
        raise TopologyError(
            f"WORLD_SIZE is {found} but the job needs {self.world_size} processes ({self.degrees}); start it with "
            f"`torchrun --nnodes NODES --nproc-per-node PROCESSES -m trainclient train ...` where NODES x PROCESSES = "
            f"{self.world_size}, on one machine: `torchrun --standalone --nproc-per-node {self.world_size} -m "
            "trainclient train ...`"
        )

    @property
    def degrees(self) -> str:
        """What the processes hold, in words."""
        return ", ".join(
            f"{_together(held)} dp {held[0].dp}"
            + "".join(f" x {key} {n}" for key in ("pp", "sp", "tp") if (n := getattr(held[0], key)) > 1)
            for held in dict.fromkeys(process.modules for process in self.processes)
        )

    def ranks(self, chunk: Chunk, sp: int = 0) -> tuple[int, ...]:
        """Global ranks of the processes that hold a chunk and have that share of its sequences, by their data-parallel
        rank; tensor-parallel leaders only."""
        which = (0, sp)
        return tuple(rank for rank, p in enumerate(self.processes) if chunk in p.chunks and (p.tp, p.sp) == which)

    def into(self, chunk: Chunk) -> tuple[Edge, ...]:
        """The edges into a chunk."""
        return tuple(edge for edge in self.edges if edge.target == chunk)

    def out_of(self, chunk: Chunk) -> tuple[Edge, ...]:
        """The edges out of a chunk."""
        return tuple(edge for edge in self.edges if edge.source == chunk)

    def pairs(self, edge: Edge) -> tuple[tuple[int, int], ...]:
        """Global ranks (source, target) between which rows may move: of a share to the same one, or of all through the
        first one."""
        if edge.is_straight:
            shares = range(edge.source.module.sp)
            both = ((self.ranks(edge.source, sp), self.ranks(edge.target, sp)) for sp in shares)
            return tuple(pair for ends in both for pair in zip(*ends, strict=True))
        return tuple(product(self.ranks(edge.source), self.ranks(edge.target)))

    @property
    def stages(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Global ranks of each stage of each module, by data-parallel rank with its share, and tensor-parallel rank."""
        found: dict[tuple[Chunk, ...], list[list[int]]] = {}
        for rank, process in enumerate(self.processes):
            of_ranks = found.setdefault(process.chunks, [])
            if process.tp == 0:
                of_ranks.append([])
            of_ranks[-1].append(rank)
        return tuple(tuple(map(tuple, of_ranks)) for of_ranks in found.values())

    def _alike(self, key: Callable[[GridProcess], Hashable]) -> tuple[tuple[int, ...], ...]:
        """Global ranks of processes with equal keys."""
        found: dict[Hashable, list[int]] = {}
        for rank, process in enumerate(self.processes):
            found.setdefault(key(process), []).append(rank)
        return tuple(map(tuple, found.values()))


def _together(modules: tuple[ModuleSpec, ...]) -> str:
    return " + ".join(m.name for m in modules)


def _chunks(module: ModuleSpec, execution: Execution) -> tuple[Chunk, ...]:
    """A module's chunks in their order; only stages that hold samples hold several."""
    count = module.pp * (execution.layout.num_chunks if module.holds_samples else 1)
    return tuple(Chunk(module, number, count) for number in range(count))


def _one_module_each(execution: Execution, chunks: dict[str, tuple[Chunk, ...]]) -> Iterator[GridProcess]:
    for m in execution.modules:
        for rank, stage, sp, tp in product(range(m.dp), range(m.pp), range(m.sp), range(m.tp)):
            yield GridProcess(chunks[m.name][stage :: m.pp], rank, stage, tp, sp)


def _all_modules_each(execution: Execution, chunks: dict[str, tuple[Chunk, ...]]) -> Iterator[GridProcess]:
    held = tuple(chunk for m in execution.by_depth for chunk in chunks[m.name])
    backbone = execution.backbone
    yield from (GridProcess(held, rank, 0, tp) for rank, tp in product(range(backbone.dp), range(backbone.tp)))


def _edges(execution: Execution, chunks: dict[str, tuple[Chunk, ...]]) -> Iterator[Edge]:
    """Between the modules that exchange rows, from the last chunk to the first; and from chunk to chunk of a module."""
    for source, target in execution.exchanging:
        if source != target:
            yield Edge(chunks[source][-1], chunks[target][0])
    for found in chunks.values():
        yield from (Edge(*pair) for pair in pairwise(found))
