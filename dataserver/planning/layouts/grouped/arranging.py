"""Samples and images of sequence-parallel groups: who holds what, within the memory of encoders and generators."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.grouped.policies import halved
from dataserver.planning.layouts.grouped.sequence_plan import SequenceGroup
from dataserver.planning.plan.arranging import (
    WaveTooLargeError,
    arrange_and_route,
    arrange_samples,
    images_beside,
    spread_images,
)
from dataserver.planning.plan.naming import sample_name
from dataserver.planning.plan.placement import Placement
from dataserver.planning.plan.plan import Arrangement, Routing
from dataserver.planning.stream.samples import StepSamples

Microbatches = Sequence[Sequence[SequenceGroup]]
"""The groups of each microbatch, by rank; their sequences are indices into the step's."""


@dataclass(frozen=True, slots=True)
class ArrangedGroups:
    """Groups whose images fit the memory of encoders and generators."""

    microbatches: Microbatches
    sequence: I64
    """int64 [n], the sequence of each sample."""
    arrangements: tuple[Arrangement, ...]
    """One for each module, in the order of the job."""
    routings: tuple[Routing, ...]


def arrange_groups(job: Job, samples: StepSamples, microbatches: Microbatches, sequence: I64) -> ArrangedGroups:
    """Place samples with the first ranks of their groups, and spread the images of every microbatch over all ranks.

    A microbatch whose images no memory holds is halved as often as needed, and so is a packed sequence that is alone.

    `sequence` is int64 [n], the sequence of each sample.

    Raises:
        WaveTooLargeError: the images of a single sample do not fit; names it.
    """
    while True:
        try:
            return _arrange(job, samples, microbatches, sequence)
        except WaveTooLargeError as error:
            groups, wave = microbatches[error.wave], error.wave
            if sum(len(group.sequences) for group in groups) == 1:
                sequence, groups = _unpacked(job, samples, groups, sequence, error)
            microbatches = [*microbatches[:wave], *halved(groups), *microbatches[wave + 1 :]]


def _unpacked(
    job: Job, samples: StepSamples, groups: Sequence[SequenceGroup], sequence: I64, error: WaveTooLargeError
) -> tuple[I64, Sequence[SequenceGroup]]:
    """The only sequence of a microbatch as two, every other sample in the second."""
    (old,) = (s for group in groups for s in group.sequences)
    members = np.flatnonzero(sequence == old)
    if len(members) == 1:
        name = sample_name(job.stream, samples, int(members[0]))
        raise WaveTooLargeError(f"{error}. The wave holds one sample: {name}", error.wave) from error
    new, changed = int(sequence.max()) + 1, sequence.copy()
    changed[members[1::2]] = new
    return changed, [replace(g, sequences=(old, new)) if g.sequences else g for g in groups]


def _arrange(job: Job, samples: StepSamples, microbatches: Microbatches, sequence: I64) -> ArrangedGroups:
    """Raises WaveTooLargeError where the images of a microbatch do not fit."""
    execution = job.spec.execution
    placement = Placement(*(np.zeros(int(sequence.max(initial=-1)) + 1, np.int64) for _ in range(3)))
    for wave, groups in enumerate(microbatches):
        yield_point()
        for group in groups:
            members = list(group.sequences)
            placement.rank[members], placement.wave[members] = group.first_rank, wave
            placement.slot[members] = np.arange(len(members))
    backbone = arrange_samples(execution.backbone, samples, sequence, placement)
    arrangements, routings = {backbone.module: backbone}, []
    for module in execution.modules:
        if module.name != backbone.module:
            beside = images_beside(job.spec, module, samples, backbone)
            sizes, ranks = samples.patches[beside.image], execution.backbone.dp
            depths = samples.depths(beside.image)
            rank = spread_images(module, sizes, beside.rank, beside.microbatch, ranks, 1, depths)
            found = arrange_and_route(module, backbone, beside, rank, beside.microbatch)
            arrangements[module.name] = found[0]
            routings.append(found[1])
    ordered = tuple(arrangements[m.name] for m in execution.modules)
    return ArrangedGroups(microbatches, sequence, ordered, tuple(routings))
