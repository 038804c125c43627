"""The phases of a job whose modules are colocated, from the samples of a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from dataserver.planning.arranging import TASK_OF, image_rows
from dataserver.planning.balancing import Memory, bin_loads
from dataserver.planning.costs import forward_ns
from dataserver.planning.jobspec import Execution, JobSpec, ModuleKind, ModuleSpec
from dataserver.planning.phases.interface import Link, Phase
from dataserver.planning.samples import I64, StepSamples


@dataclass(frozen=True, slots=True)
class PhaseOptions:
    """How one module batches its items."""

    padded: bool = False
    """Items are padded to the longest of their rank."""
    equal_counts: bool = False
    """Ranks take equal counts of items."""
    max_size: int | None = None
    """Patches or tokens, padding included, that a rank can hold."""


_NO_OPTIONS: Mapping[str, PhaseOptions] = MappingProxyType({})


def colocated_phases(
    spec: JobSpec,
    samples: StepSamples,
    row_bytes: int,
    sequence: I64 | None = None,
    options: Mapping[str, PhaseOptions] = _NO_OPTIONS,
) -> tuple[tuple[Phase, ...], tuple[Link, ...]]:
    """The phases of a job in the order of its module list, and what goes between them.

    Items of the backbone are sequences, of the others images. A further encoder (audio, video) is one more `Phase`
    with a `Link` to the backbone.

    Args:
        spec: every module has the same dp, tp and sp, and one stage: a rank runs them all.
        samples: of the step.
        row_bytes: bytes of an embedding or condition, which all have the width of the backbone.
        sequence: int64 [n]: the sequence of each sample (`packing`), 0, 1, ... without gaps; None: a sample each.
        options: by name of module.

    Raises:
        ValueError: the modules are not colocated, or options or sequences do not fit the job.
    """
    execution = spec.execution
    _check_colocated(execution, options)
    backbone = execution.backbone
    if sequence is None:
        sequence = np.arange(len(samples), dtype=np.int64)
    count = _count_sequences(samples, sequence)
    phases, links = [], []
    for module in execution.modules:
        chosen = options.get(module.name, PhaseOptions())
        if module.kind is ModuleKind.BACKBONE:
            phases.append(_backbone_phase(module, samples, sequence, count, chosen))
            continue
        task = TASK_OF[module.kind]
        images = np.flatnonzero(samples.task[samples.image_sample] == task)
        sample, sizes = samples.image_sample[images], samples.patches[images]
        phases.append(_phase(module, forward_ns(module.cost, sizes), sizes, sample, chosen))
        own, theirs = (module.name, np.arange(len(images), dtype=np.int64)), (backbone.name, sequence[sample])
        source, target = (own, theirs) if module.kind is ModuleKind.ENCODER else (theirs, own)
        rows = image_rows(spec.stream, samples, images, task)
        links.append(Link(source[0], target[0], source[1], target[1], rows, row_bytes))
    return tuple(phases), tuple(links)


def _check_colocated(execution: Execution, options: Mapping[str, PhaseOptions]) -> None:
    degrees = {m.name: (m.dp, m.tp, m.sp, m.pp) for m in execution.modules}
    if len(set(degrees.values())) > 1 or execution.backbone.pp > 1:
        raise ValueError(
            f"modules have (dp, tp, sp, pp) {degrees}; colocated modules need the same degrees and pp 1, since every "
            "rank runs them all"
        )
    unknown = sorted(options.keys() - degrees.keys())
    if unknown:
        raise ValueError(f"options for {unknown}; the job has modules {list(degrees)}")


def _count_sequences(samples: StepSamples, sequence: I64) -> int:
    """How many there are; refuses numbers that do not fit the samples."""
    count = int(sequence.max(initial=-1)) + 1
    if len(sequence) != len(samples) or sequence.min(initial=0) < 0 or len(np.unique(sequence)) != count:
        raise ValueError(
            f"{len(sequence)} samples are in {count} sequences, the step has {len(samples)} samples; each needs a "
            "sequence, and these are numbered from 0 without gaps"
        )
    return count


def _backbone_phase(module: ModuleSpec, samples: StepSamples, sequence: I64, count: int, chosen: PhaseOptions) -> Phase:
    """The phase whose items are sequences; attention stays within a sample, so their loads add up."""
    if chosen.padded and count < len(samples):
        raise ValueError(f"module {module.name} is padded but sequences hold several samples; pad or pack, not both")
    loads = bin_loads(forward_ns(module.cost, samples.tokens), sequence, count)
    first = np.unique(sequence, return_index=True)[1].astype(np.int64)
    return _phase(module, loads, bin_loads(samples.tokens, sequence, count), first, chosen)


def _phase(module: ModuleSpec, loads: I64, sizes: I64, sample: I64, chosen: PhaseOptions) -> Phase:
    return Phase(
        name=module.name,
        loads=loads,
        sample=sample,
        constant_ns=module.cost.microbatch_ns,
        padded=chosen.padded,
        equal_counts=chosen.equal_counts,
        memory=None if chosen.max_size is None else Memory(sizes, chosen.max_size),
    )
