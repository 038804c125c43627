"""The grid of processes: the part of a module that each global rank holds, and the edges between parts.

A module is cut into *chunks*, consecutive shares of its layers: one for each stage, or several where they are
interleaved. Chunks are the nodes of a graph, and the rows that move between them its *edges*; nothing here assumes
that it is a chain. Which chunks a process holds, and how rows move along the edges, the job's layout decides.

A tensor-parallel group works on the same rows, and its first rank, the leader, exchanges them with other processes.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Self

from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.job.spec import Execution, JobSpec
from trainclient.layouts.registry import layout_part
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
    """Tensor-parallel rank of the process."""
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
    """Global ranks of the processes."""

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
    message_edges: tuple[Edge, ...] = ()
    """The edges whose rows move by messages from process to process; those of the others move by collectives."""
    collectives: tuple[tuple[int, ...], ...] = ()
    """Global ranks of the processes of each collective that rows or features move by. A process is in one at most."""
    plan_checked_ranks: tuple[int, ...] = ()
    """Global ranks of the processes that compare their plans before each step, since their collectives take the sizes
    of messages from it."""
    lockstep_ranks: tuple[int, ...] = ()
    """Global ranks of a backbone whose ranks share sequences: each pass begins for all of them together, since they
    gather parameters for it."""
    changing_groups: tuple[SequenceGroup, ...] = ()
    """The groups of backbone ranks that share sequences in some microbatches."""

    @classmethod
    def of(cls, spec: JobSpec) -> Self:
        """The processes of a job, as its layout has them.

        Raises:
            TopologyError: the job asks for a parallelism that this trainer does not have.
        """
        require_supported(spec.execution)
        found = layout_part(spec.execution.layout.kind, "topology").topology(spec.execution)
        if not isinstance(found, cls):
            raise TypeError(f"the layout's topology is a {type(found).__name__}; a {cls.__name__} is required")
        return found

    @property
    def is_uniform(self) -> bool:
        """Whether all processes run the same operations at the same time: they hold the same chunks and never wait for
        some of the others alone."""
        return len(self.stages) == 1 and not self.lockstep_ranks

    @property
    def collective_edges(self) -> tuple[Edge, ...]:
        """The edges whose rows move by collectives."""
        return tuple(edge for edge in self.edges if edge not in self.message_edges)

    @property
    def sequence_groups(self) -> tuple[SequenceGroup, ...]:
        """Every group of several processes that may share sequences: ranks of the backbone, or those of one rank."""
        alike = self._alike(lambda process: (process.chunks, process.rank, process.tp))
        return (
            *self.changing_groups,
            *(SequenceGroup((self.processes[found[0]].rank,), found) for found in alike if len(found) > 1),
        )

    @property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Global ranks of the processes that work on the same views, where they are several."""
        alike = self._alike(lambda process: (process.chunks, process.rank))
        return tuple(found for found in alike if len(found) > 1)

    @property
    def world_size(self) -> int:
        """Number of processes in the run."""
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


def chunks_of(execution: Execution) -> dict[str, tuple[Chunk, ...]]:
    """The chunks of each module in their order; only stages that hold samples hold several."""
    counts = {m: m.pp * (execution.layout.num_chunks if m.holds_samples else 1) for m in execution.modules}
    return {m.name: tuple(Chunk(m, number, count) for number in range(count)) for m, count in counts.items()}


def processes_of_modules(execution: Execution) -> tuple[GridProcess, ...]:
    """The processes where each module has its own, module by module in the order of the job.

    Within a module the data-parallel rank comes first, then the stage, so that the stages of one pipeline are
    neighbours and share a node, then which share of its sequences (sp), then the tensor-parallel rank.
    """
    chunks = chunks_of(execution)
    return tuple(
        GridProcess(chunks[m.name][stage :: m.pp], rank, stage, tp, sp)
        for m in execution.modules
        for rank, stage, sp, tp in product(range(m.dp), range(m.pp), range(m.sp), range(m.tp))
    )


def edges_of(execution: Execution) -> tuple[Edge, ...]:
    """Return the edges from the last chunk of a module to the first of one that takes its rows; and from chunk to chunk
    of a module."""
    chunks = chunks_of(execution)
    between = [(source, target) for source, target in execution.exchanging if source != target]
    return (
        *(Edge(chunks[source][-1], chunks[target][0]) for source, target in between),
        *(Edge(*pair) for found in chunks.values() for pair in pairwise(found)),
    )
