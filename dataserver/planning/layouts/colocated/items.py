"""What the modules of a colocated job handle in a step."""

from dataclasses import dataclass, replace

import numpy as np

from dataserver.planning import I64, Bool
from dataserver.planning.balancing import BinBudget, bin_loads
from dataserver.planning.costs.model import forward_ns, items_ns
from dataserver.planning.job.fields import ModuleKind, ModuleSpec
from dataserver.planning.job.spec import JobSpec
from dataserver.planning.plan.arranging import TASK_OF, image_rows, module_images
from dataserver.planning.stream.samples import StepSamples


@dataclass(frozen=True, slots=True)
class ModuleItems:
    """The k items that one module handles in a step: images, or the sequences of the backbone."""

    module: ModuleSpec
    index: I64
    """int64 [k]: images of the step, ascending; sequences count from 0."""
    sizes: I64
    """int64 [k]: patches or tokens, which need the module's memory."""
    loads: I64
    """int64 [k]: nanoseconds of each item's forward."""
    sequence: I64
    """int64 [k]: the sequence of each."""
    rows: I64
    """int64 [k]: embeddings or conditions that pass between image and sequence; of a sequence 0."""
    slots: int | None
    """Items that a microbatch holds at most."""

    def taken(self, which: Bool, sequence: I64) -> "ModuleItems":
        """Some of them, bool [k], with other numbers of their sequences, int64 [k]."""
        parts = {name: getattr(self, name)[which] for name in ("index", "sizes", "loads", "rows")}
        return replace(self, sequence=sequence[which], **parts)

    def budget(self, microbatches: int = 1) -> BinBudget | None:
        """What the items need of the memory of so many microbatches of a rank."""
        if self.module.memory is None:
            return None
        budget, step = microbatches * self.module.memory.units, self.module.step_units
        return BinBudget(self.sizes, budget if step is None else min(budget, step))

    def step_budget(self, needs: I64) -> BinBudget | None:
        """What `needs`, int64 [any], such as padded microbatches, take of a rank's memory for the whole step."""
        step = self.module.step_units
        return None if step is None else BinBudget(needs, step)


def module_items(spec: JobSpec, samples: StepSamples, sequence: I64) -> tuple[ModuleItems, ...]:
    """The items of every module, in the order of the job's module list.

    `sequence` is int64 [n]: the sequence of each sample, 0, 1, ... without gaps (`sequences.pack_step`).
    """
    count = int(sequence.max(initial=-1)) + 1
    return tuple(
        _sequences(m, spec.execution.microbatch, samples, sequence, count)
        if m.kind is ModuleKind.BACKBONE
        else _images(spec, m, samples, sequence)
        for m in spec.execution.modules
    )


def _sequences(module: ModuleSpec, slots: int, samples: StepSamples, sequence: I64, count: int) -> ModuleItems:
    """Attention stays within a sample, so that the loads of a sequence's samples add up."""
    number = np.arange(count, dtype=np.int64)
    return ModuleItems(
        module=module,
        index=number,
        sizes=bin_loads(samples.tokens, sequence, count),
        loads=bin_loads(forward_ns(module.cost, samples.tokens), sequence, count),
        sequence=number,
        rows=np.zeros(count, np.int64),
        slots=slots,
    )


def _images(spec: JobSpec, module: ModuleSpec, samples: StepSamples, sequence: I64) -> ModuleItems:
    images = module_images(spec, module, samples)
    sample, sizes = samples.image_sample[images], samples.patches[images]
    return ModuleItems(
        module=module,
        index=images,
        sizes=sizes,
        loads=items_ns(module.cost, sizes, samples.depths(images)),
        sequence=sequence[sample],
        rows=image_rows(spec.stream, samples, images, TASK_OF[module.kind]),
        slots=None,
    )
