"""Which process is which: from the modules of a job to global ranks.

Ranks are dealt module by module in the order of the job. Within the backbone the data-parallel rank comes first, then
the stage, so that the stages of one pipeline are neighbours and share a node.
"""

from dataclasses import dataclass
from typing import Self

from dataserver.planning.job import Execution, JobSpec
from dataserver.planning.jobspec import ModuleKind, ModuleSpec
from dataserver.planning.pipelined.options import PipelinedOptions


class TopologyError(ValueError):
    """Processes that do not fit the job."""


@dataclass(frozen=True, slots=True)
class Place:
    """What one process is."""

    module: ModuleSpec
    rank: int
    """Data-parallel rank within the module."""
    stage: int
    """Pipeline stage within the module."""

    @property
    def is_first_stage(self) -> bool:
        """Whether the module's inputs enter here."""
        return self.stage == 0

    def __str__(self) -> str:
        stage = f" stage {self.stage}" if self.module.pp > 1 else ""
        return f"{self.module.name} rank {self.rank}{stage}"


@dataclass(frozen=True, slots=True)
class Topology:
    """All processes of a job."""

    pipeline: tuple[tuple[ModuleSpec, int], ...]
    """The stages of the joined pipeline as (module, stage): encoder, backbone stages, generator, those there are."""
    places: tuple[Place, ...]
    """What each global rank is."""

    @classmethod
    def of(cls, spec: JobSpec) -> Self:
        """The processes of a job.

        Raises:
            TopologyError: the job asks for a parallelism that this trainer does not have.
        """
        _require_supported(spec.execution)
        modules = spec.execution.modules
        return cls(
            pipeline=tuple((m, stage) for m in spec.execution.by_depth for stage in range(m.pp)),
            places=tuple(Place(m, rank, stage) for m in modules for rank in range(m.dp) for stage in range(m.pp)),
        )

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return len(self.places)

    def require_world_size(self, found: int) -> None:
        """Raise TopologyError, with the command to run, unless there are exactly as many processes as the job needs."""
        if found == self.world_size:
            return
        modules = ", ".join(
            f"{m.name} dp {m.dp}" + (f" x pp {m.pp}" if m.pp > 1 else "")
            for m in dict.fromkeys(place.module for place in self.places)
        )
        raise TopologyError(
            f"WORLD_SIZE is {found} but the job needs {self.world_size} processes ({modules}); start it with "
            f"`torchrun --nnodes NODES --nproc-per-node PROCESSES -m trainclient train ...` where NODES x PROCESSES = "
            f"{self.world_size}, on one machine: `torchrun --standalone --nproc-per-node {self.world_size} -m "
            "trainclient train ...`"
        )

    def pipeline_stage(self, place: Place) -> int:
        """Stage of a process in the joined pipeline."""
        return self.pipeline.index((place.module, place.stage))

    def ranks(self, module: ModuleSpec, stage: int) -> tuple[int, ...]:
        """Global ranks of the data-parallel ranks of one stage of a module, in order."""
        return tuple(r for r, p in enumerate(self.places) if p.module == module and p.stage == stage)

    def sources(self, place: Place) -> tuple[int, ...]:
        """Global ranks that send to this process in forward passes, indexed by data-parallel rank of the stage before.

        Between the stages of a module only the peer of the same data-parallel rank.
        """
        return self._neighbours(place, -1)

    def targets(self, place: Place) -> tuple[int, ...]:
        """Global ranks that this process sends to in forward passes; see `sources`."""
        return self._neighbours(place, +1)

    def _neighbours(self, place: Place, direction: int) -> tuple[int, ...]:
        other = self.pipeline_stage(place) + direction
        if not 0 <= other < len(self.pipeline):
            return ()
        module, stage = self.pipeline[other]
        ranks = self.ranks(module, stage)
        return (ranks[place.rank],) if module == place.module else ranks


def _require_supported(execution: Execution) -> None:
    """Refuse what servers plan and serve, but this trainer does not run."""
    layout = execution.layout
    chunks = layout.chunks if isinstance(layout, PipelinedOptions) else None
    if chunks != 1:
        kind = layout.kind if chunks is None else f"{layout.kind} with {chunks} chunks"
        raise TopologyError(
            f"the job's layout is {kind}; this trainer runs pipelines of one chunk for each stage, set layout.kind to "
            "pipelined and its schedule to 1f1b or gpipe"
        )
    for kind in (ModuleKind.ENCODER, ModuleKind.GENERATOR):
        names = [m.name for m in execution.of_kind(kind)]
        if len(names) > 1:
            raise TopologyError(
                f"the job has the {kind} modules {names}; this trainer runs one of a kind, which then handles the "
                "images of all datasets"
            )
    for module in execution.modules:
        for name, degree in (("tp", module.tp), ("sp", module.sp)):
            if degree > 1:
                raise TopologyError(
                    f"module {module.name} has {name} {degree}; this trainer runs data and pipeline parallelism only, "
                    f"set {name} to 1 and raise dp or pp instead"
                )
        if module.padded:
            raise TopologyError(f"module {module.name} is padded; this trainer does not pad items, leave padded out")
