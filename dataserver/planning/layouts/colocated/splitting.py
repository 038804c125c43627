"""Sequences that no round holds, taken apart: a sequence stays in one round, with the images of all its samples."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.balancing import bin_loads
from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import JobSpec
from dataserver.planning.layouts.colocated.items import ModuleItems, module_items
from dataserver.planning.layouts.colocated.limits import round_holds, surely_retained
from dataserver.planning.layouts.shared.sequences import pack_step
from dataserver.planning.stream.packing import number_by_first
from dataserver.planning.stream.samples import StepSamples

Pack = Callable[[int], tuple[I64, int]]
"""Packs as `pack_step`, of the samples of a step: sequences, and their microbatches, at least so many."""


def pack_for_rounds(job: Job, samples: StepSamples) -> Pack:
    """What packs as `pack_step` does, but into sequences that rounds hold."""
    execution, known = job.spec.execution, dict[bytes, I64]()
    slots = execution.backbone.dp * execution.microbatch

    def pack(at_least: int) -> tuple[I64, int]:
        packed, microbatches = pack_step(job, samples, at_least)
        key = packed.tobytes()  # most packers pack in one way, however many microbatches there are
        if key not in known:
            known.clear()
            known[key] = split_sequences(job.spec, samples, packed)
        return known[key], max(microbatches, -(-(int(known[key].max(initial=-1)) + 1) // slots))

    return pack


def split_sequences(spec: JobSpec, samples: StepSamples, sequence: I64) -> I64:
    """The sequence of each sample, int64 [n], where those that no round holds are halved until one holds every part."""
    items = [i for i in module_items(spec, samples, sequence) if not i.module.holds_samples]
    found, count = sequence.copy(), int(sequence.max(initial=-1)) + 1
    doubtful = np.zeros(count, np.bool_)
    for own in items:
        largest = np.zeros(count, np.int64)
        np.maximum.at(largest, own.sequence, own.sizes)
        doubtful |= ~surely_retained(own.module, bin_loads(own.sizes, own.sequence, count), largest)
    for number in np.flatnonzero(doubtful).tolist():
        yield_point()
        here = [i.taken(i.sequence == number, i.sequence) for i in items]
        _, *others = _parts(here, samples, np.flatnonzero(sequence == number))
        for part in others:
            found[part] = count
            count += 1
    return number_by_first(found)


def _parts(items: Sequence[ModuleItems], samples: StepSamples, members: I64) -> Iterator[I64]:
    """Samples of one sequence, int64 [k], in parts that a round holds, or single ones; their images are the items."""
    mine = [i.taken(np.isin(samples.image_sample[i.index], members), np.zeros_like(i.sequence)) for i in items]
    if len(members) == 1 or all(round_holds(i) for i in mine):
        yield members
    else:
        for half in np.array_split(members, 2):
            yield from _parts(mine, samples, half)
