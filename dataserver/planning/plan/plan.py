"""The plan of one step: which rank and microbatch holds what, in every module.

A plan is made from metadata alone. All views of a step are cut from one plan and carry its hash.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.identity import Job
from dataserver.planning.plan.integers import to_fewest_bytes
from dataserver.planning.stream.samples import StepSamples, Task


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """Which rank and microbatch of one module holds each of its k items.

    Items are samples in a backbone and a text tower, and images elsewhere (encoder: those that are understood;
    generator: targets).
    All arrays are int64 [k], sorted by (rank, microbatch, start).
    """

    module: str
    item: I64
    """Index into the step's samples or images."""
    rank: I64
    """Data-parallel rank within the module."""
    microbatch: I64
    """Microbatch of that rank; where modules run as a pipeline, the wave."""
    slot: I64
    """Backbone: sequence slot within the microbatch. Elsewhere: position within the microbatch."""
    start: I64
    """First row of the item in its microbatch: tokens (backbone, text tower), embeddings (encoder), conditions
    (generator), patches (image tower)."""

    def of(self, rank: int, microbatch: int) -> slice:
        """The items of one rank's microbatch.

        By `bisect`: numpy's search lets go of the interpreter, and to have it back takes longer beside busy threads.
        """
        begin = bisect_left(self.rank, rank)
        end = bisect_left(self.rank, rank + 1, begin)
        first = bisect_left(self.microbatch, microbatch, begin, end)
        return slice(first, bisect_left(self.microbatch, microbatch + 1, first, end))


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Rows that move from one module's output to another's input, over the whole step.

    All arrays are int64 [r], sorted by (source_microbatch, source_rank, source_start). One entry for each image: its
    embeddings (encoder to backbone) or its conditions (backbone to generator). In a pipeline both microbatches are the
    wave; only colocated modules, whose phases run alone, have different ones.
    """

    source_module: str
    target_module: str
    source_microbatch: I64
    source_rank: I64
    source_start: I64
    """First row in the output of the source rank's microbatch."""
    target_microbatch: I64
    target_rank: I64
    target_start: I64
    """First row in the input of the target rank's microbatch."""
    rows: I64

    @property
    def empty(self) -> "Routing":
        """Return a routing between the same modules without entries."""
        return Routing(self.source_module, self.target_module, *(np.zeros(0, np.int64) for _ in range(7)))


@dataclass(frozen=True, slots=True, eq=False)
class ModuleSchedule:
    """How many microbatches the stages of a module hold at most between forward and backward.

    What follows from it for each stage is for the layout to say (`layout.Layout.programs`).
    """

    module: str
    in_flight: I64
    """int64 [pp], at least 1 each."""
    drain_every: int = 0
    """Microbatches after which a stage runs all its backwards before the next forward: those of a contrastive batch
    under batch_sync, or of a round of colocated modules. 0: only the end of the step drains it."""
    chunks: int = 1
    """Model chunks of each stage; with several, `in_flight` counts passes of a microbatch through one chunk."""


def round_size(schedules: Sequence[ModuleSchedule], num_microbatches: int) -> int:
    """Microbatches of a round, after which all stages are drained: all of the step, unless the schedules drain them."""
    return max((s.drain_every for s in schedules), default=0) or num_microbatches


@dataclass(frozen=True, slots=True, eq=False)
class RankGroups:
    """Groups of a module's ranks that share the sequences of one microbatch; g in the whole step.

    All arrays are int64 [g], sorted by (microbatch, first_rank). The groups of a microbatch make up all ranks. The
    arrangement names the first rank of a group; the others get the same view.
    """

    module: str
    """Name of the module; empty where every rank has its own sequences."""
    microbatch: I64
    first_rank: I64
    degree: I64

    def of(self, microbatch: int) -> slice:
        """The groups of one microbatch."""
        first = bisect_left(self.microbatch, microbatch)
        return slice(first, bisect_left(self.microbatch, microbatch + 1, first))

    def holder(self, module: str, rank: int, microbatch: int) -> int:
        """The rank that the arrangement names for a rank of a module: the first of its group, or itself."""
        return rank if module != self.module else int(self.first_rank[self._of_rank(rank, microbatch)])

    def reader(self, module: str, rank: int, step: int, microbatch: int) -> int:
        """The rank that fetches the view of a rank of a module, where one does for all of its group; or itself."""
        return rank if module != self.module else int(self.readers(step)[self._of_rank(rank, microbatch)])

    def readers(self, step: int) -> I64:
        """int64 [g]: the rank of each group that fetches its view where one does for all; they take turns."""
        readers: I64 = self.first_rank + (step + self.microbatch) % self.degree
        return readers

    def _of_rank(self, rank: int, microbatch: int) -> int:
        """The group of a rank."""
        here = self.of(microbatch)
        before: int = here.start
        return before + int(np.searchsorted(self.first_rank[here], rank, side="right")) - 1


NO_GROUPS = RankGroups("", *(np.zeros(0, np.int64) for _ in range(3)))
"""Every rank has its own sequences."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing that was decided, and why."""

    subject: str
    """What it is about: a module, or the step."""
    chosen: str
    reason: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the plans that were compared."""

    name: str
    """How the sequences were placed and the images spread."""
    makespan_ns: int
    """Simulated time of the step."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrangedStep:
    """Where every item of a step goes and what every stage holds: all that the simulator asks of a plan."""

    samples: StepSamples
    num_microbatches: int
    """Number of microbatches that each rank of every module runs."""
    sequences_per_microbatch: int
    """Sequence slots of each backbone microbatch; some may be empty."""
    arrangements: tuple[Arrangement, ...]
    """One for each module, in the order of the job's module list."""
    routings: tuple[Routing, ...]
    """Encoders to backbone, backbone to generators, as far as the job has them."""
    schedules: tuple[ModuleSchedule, ...] = ()
    """One for each module, in the order of the job's module list; none while they are being chosen."""
    groups: RankGroups = NO_GROUPS
    """Sequence-parallel groups of the backbone; `NO_GROUPS` without."""

    def arrangement(self, module: str) -> Arrangement:
        """The arrangement of a module that the job has."""
        return next(a for a in self.arrangements if a.module == module)

    def in_flight(self, module: str) -> I64:
        """int64 [pp]: microbatches that each stage of a module holds at most."""
        return next(s.in_flight for s in self.schedules if s.module == module)


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class StepPlan(ArrangedStep):
    """Everything that is decided about one step."""

    job_id: str
    stream_id: str
    step: int
    text_tokens: int
    """Denominator of the text loss: target tokens of the whole step; 0 for towers, whose loss counts pairs."""
    target_patches: int
    """Denominator of the generator's loss: target patches of the whole step."""
    hash: bytes
    """SHA-256 of all the above, 32 bytes."""
    candidates: tuple[Candidate, ...] = ()
    """The plans that were compared, fastest first: the first is this one. Empty where the policies leave no choice."""
    decisions: tuple[Decision, ...] = ()
    """What else was decided, and why."""


def plan_hash(version: int, job_id: str, step: int, arranged: ArrangedStep) -> bytes:
    """SHA-256 over job, step and every array of a plan, each preceded by its length. Of numbers, zeros are left out.

    Arrays have as few bytes as their largest value takes, a quarter in all: every server of a plan computes its hash.
    """
    digest = hashlib.sha256(f"disttrain plan {version}\n{job_id}\n{step}\n{arranged.num_microbatches}\n".encode())
    parts: tuple[StepSamples | Arrangement | Routing | ModuleSchedule | RankGroups, ...]
    parts = (arranged.samples, *arranged.arrangements, *arranged.routings, *arranged.schedules, arranged.groups)
    for part in parts:
        for field in fields(part):
            name, value = field.name, getattr(part, field.name)
            if value is None:
                continue
            if isinstance(value, str):
                digest.update(f"{name} {value}\n".encode())
            elif isinstance(value, int):
                digest.update(f"{name} {value}\n".encode() if value else b"")
            else:
                words = to_fewest_bytes(value)
                digest.update(f"{name} {len(words)} {words.itemsize}\n".encode())
                digest.update(words.data)
    return digest.digest()


def make_plan(job: Job, step: int, arranged: ArrangedStep) -> StepPlan:
    """A plan with what follows from its parts: the denominators of the losses, and its hash."""
    samples = arranged.samples
    first, end = samples.images_with(Task.GENERATION)
    return StepPlan(
        **{field.name: getattr(arranged, field.name) for field in fields(ArrangedStep)},
        job_id=job.job_id,
        stream_id=job.stream_id,
        step=step,
        text_tokens=int(samples.num_targets @ (samples.task == Task.UNDERSTANDING)),
        target_patches=int(samples.patches[first[first < end]].sum()),
        hash=plan_hash(job.spec.execution.plan_version, job.job_id, step, arranged),
    )
