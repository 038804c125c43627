"""The plan of one step: which rank and microbatch holds what, in every module.

A plan is made from metadata alone. All views of a step are cut from one plan and carry its hash.
"""

import hashlib
from dataclasses import dataclass, fields

import numpy as np

from dataserver.planning.samples import I64, StepSamples


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Which rank and microbatch of one module holds each of its k items.

    Items are samples in the backbone and images elsewhere (encoder: those that are understood; generator: targets).
    All arrays are int64 [k], sorted by (rank, microbatch, start).
    """

    module: str
    item: I64
    """Index into the step's samples or images."""
    rank: I64
    """Data-parallel rank within the module."""
    microbatch: I64
    """Microbatch, which is also the wave."""
    slot: I64
    """Backbone: sequence slot within the microbatch. Elsewhere: position within the microbatch."""
    start: I64
    """First row of the item in its microbatch: tokens (backbone), embeddings (encoder), conditions (generator)."""

    def of(self, rank: int, microbatch: int) -> slice:
        """The items of one rank's microbatch."""
        key = self.rank * (1 << 32) + self.microbatch
        first, last = np.searchsorted(key, [(rank << 32) + microbatch, (rank << 32) + microbatch + 1])
        return slice(int(first), int(last))


@dataclass(frozen=True, slots=True)
class Routing:
    """Rows that move from one module's output to another's input, in every wave of the step.

    All arrays are int64 [r], sorted by (microbatch, source_rank, source_start). One entry for each image: its
    embeddings (encoder to backbone) or its conditions (backbone to generator).
    """

    source_module: str
    target_module: str
    microbatch: I64
    source_rank: I64
    source_start: I64
    target_rank: I64
    target_start: I64
    rows: I64


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the plans that were compared."""

    name: str
    """How the sequences were placed and the images spread."""
    makespan_ns: int
    """Simulated time of the step."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that is decided about one step."""

    job_id: str
    stream_id: str
    step: int
    samples: StepSamples
    num_microbatches: int
    """Of each rank of every module."""
    sequences_per_microbatch: int
    """Sequence slots of each backbone microbatch; some may be empty."""
    arrangements: tuple[Arrangement, ...]
    """One for each module, in the order of the job's module list."""
    routings: tuple[Routing, ...]
    """Encoder to backbone, backbone to generator, as far as the job has them."""
    text_tokens: int
    """Denominator of the text loss: target tokens of the whole step."""
    target_patches: int
    """Denominator of the generator's loss: target patches of the whole step."""
    hash: bytes
    """SHA-256 of all the above, 32 bytes."""
    candidates: tuple[Candidate, ...] = ()
    """The plans that were compared, fastest first: this one and why. Empty where the policies leave no choice."""

    def arrangement(self, module: str) -> Arrangement:
        """The arrangement of a module that the job has."""
        return next(a for a in self.arrangements if a.module == module)


def plan_hash(
    job_id: str,
    step: int,
    samples: StepSamples,
    num_microbatches: int,
    arrangements: tuple[Arrangement, ...],
    routings: tuple[Routing, ...],
) -> bytes:
    """SHA-256 over job, step and every array of a plan as little-endian 64-bit words, each preceded by its length."""
    digest = hashlib.sha256(f"disttrain plan 1\n{job_id}\n{step}\n{num_microbatches}\n".encode())
    parts: tuple[StepSamples | Arrangement | Routing, ...] = (samples, *arrangements, *routings)
    for part in parts:
        for field in fields(part):
            name, value = field.name, getattr(part, field.name)
            if isinstance(value, str):
                digest.update(f"{name} {value}\n".encode())
            else:
                digest.update(f"{name} {len(value)}\n".encode())
                digest.update(np.ascontiguousarray(value).astype("<u8").tobytes())
    return digest.digest()
