"""What the modules of a colocated job handle in a step, and the phases that are made of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataserver.planning.arranging import TASK_OF, image_rows, module_images
from dataserver.planning.balancing import BALANCERS, Balancer, BinMemoryError, Memory, bin_loads, bin_totals, in_runs
from dataserver.planning.colocated.microbatches import NoRoomError, fits, runs, split_ranks
from dataserver.planning.colocated.phases import Link, Phase
from dataserver.planning.costs import forward_ns
from dataserver.planning.job import JobSpec
from dataserver.planning.jobspec import BalancePolicy, ModuleKind, ModuleSpec
from dataserver.planning.samples import I64, StepSamples


@dataclass(frozen=True, slots=True)
class ModuleItems:
    """The k items that one module handles in a step: images, or the sequences of the backbone."""

    module: ModuleSpec
    index: I64
    """int64 [k]: images of the step, ascending; sequences count from 0."""
    sizes: I64
    """int64 [k]: patches or tokens, which need the module's memory."""
    loads: I64
    """int64 [k]: forward nanoseconds."""
    sample: I64
    """int64 [k]: the sample of each, of a sequence its first."""
    sequence: I64
    """int64 [k]: the sequence of each."""
    rows: I64
    """int64 [k]: embeddings or conditions that pass between image and sequence; of a sequence 0."""
    slots: int | None
    """Items that a microbatch holds at most."""

    @property
    def num_sequences(self) -> int:
        """Sequences up to the last that has an item."""
        return int(self.sequence.max(initial=-1)) + 1

    def memory(self, microbatches: int = 1) -> Memory | None:
        """What the items need of the memory of so many microbatches of a rank."""
        if self.module.memory is None:
            return None
        room, step = microbatches * self.module.memory.units, self.module.memory.step_units
        return Memory(self.sizes, room if step is None else min(room, step))

    def step_memory(self, needs: I64) -> Memory | None:
        """What padded microbatches, `needs` int64 [any], take of a rank's memory for the whole step."""
        step = None if self.module.memory is None else self.module.memory.step_units
        return None if step is None else Memory(needs, step)


@dataclass(frozen=True, slots=True)
class ModulePhase:
    """The phase of one module, whose items are those of the module or, if it pads, whole microbatches of them."""

    items: ModuleItems
    phase: Phase
    unit: I64
    """int64 [k]: the phase's item that holds each of the module's."""
    home_loads: I64
    """int64 [ranks]: forward nanoseconds of each rank in the sampling layout."""


def module_items(spec: JobSpec, samples: StepSamples, sequence: I64) -> tuple[ModuleItems, ...]:
    """The items of every module, in the order of the job's module list.

    Args:
        spec: of a colocated job.
        samples: of the step.
        sequence: int64 [n]: the sequence of each sample, 0, 1, ... without gaps (`sequences.pack_step`).

    Raises:
        ValueError: the sequences do not fit the samples.
    """
    count = int(sequence.max(initial=-1)) + 1
    if len(sequence) != len(samples) or sequence.min(initial=0) < 0 or len(np.unique(sequence)) != count:
        raise ValueError(
            f"{len(sequence)} samples are in {count} sequences, the step has {len(samples)} samples; each needs a "
            "sequence, and these are numbered from 0 without gaps"
        )
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
        sample=np.unique(sequence, return_index=True)[1].astype(np.int64),
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
        loads=forward_ns(module.cost, sizes),
        sample=sample,
        sequence=sequence[sample],
        rows=image_rows(spec.stream, samples, images, TASK_OF[module.kind]),
        slots=None,
    )


def module_phase(items: ModuleItems, num_sequences: int, ranks: int, microbatches: int) -> ModulePhase:
    """How the items of a module are spread: by the balancer that it names, or as in the sampling layout.

    That layout deals out the sequences in their order and leaves every image on the rank of its sequence. It is what
    the policy `none` asks for, and what a policy that comes out slower gives way to. Items that are padded are put into
    microbatches first, by runs of least possible maximum or of equal count, and these are spread like items.

    Args:
        items: of the module.
        num_sequences: of the step.
        ranks: of every module.
        microbatches: of each rank.

    Raises:
        NoRoomError: the memory of so many microbatches does not hold the items.
    """
    home = in_runs(num_sequences, ranks)[items.sequence]
    if items.module.padded:
        return _padded_phase(items, home, ranks, microbatches)
    phase = Phase(
        name=items.module.name,
        loads=items.loads,
        sample=items.sample,
        constant_ns=microbatches * items.module.cost.microbatch_ns,
        balancer=_no_slower(items.module.balance, home),
        capacity=None if items.slots is None else items.slots * microbatches,
        memory=items.memory(microbatches),
    )
    return ModulePhase(items, phase, np.arange(len(home), dtype=np.int64), phase.rank_loads(home, ranks))


def _no_slower(policy: BalancePolicy, home: I64) -> Balancer:
    """The balancer of a policy, or `home`, int64 [k], where that is faster and keeps the memory."""

    def spread(loads: I64, num_bins: int, capacity: int | None = None, memory: Memory | None = None) -> I64:
        keeps = memory is None or fits(memory.need, home, num_bins, memory, padded=False)
        if policy is BalancePolicy.NONE:
            if not keeps:
                raise NoRoomError("the items of a rank in canonical order exceed its memory")
            return home
        planned = BALANCERS[policy.value](loads, num_bins, capacity, memory)
        slowest, at_home = (int(bin_loads(loads, bins, num_bins).max()) for bins in (planned, home))
        return home if keeps and at_home < slowest else planned

    return spread


def _padded_phase(items: ModuleItems, home: I64, ranks: int, microbatches: int) -> ModulePhase:
    """A phase whose items are the padded microbatches of all ranks."""
    module, count = items.module, ranks * microbatches
    canonical = home * microbatches + split_ranks(runs, items.loads, home, ranks, microbatches, None, None)
    options: list[tuple[I64, Balancer]] = [(canonical, runs)]
    if module.balance is not BalancePolicy.NONE:
        even = np.empty_like(canonical)
        even[np.argsort(-items.loads, kind="stable")] = in_runs(len(even), count)
        optimal, policy = BALANCERS["padded"](items.loads, count, items.slots, items.memory()), module.balance.value
        options = [(optimal, BALANCERS[policy]), (even, BALANCERS[policy]), *options]
    kept = [o for o in options if fits(items.sizes, o[0], count, items.memory(), padded=True)]
    if not kept:
        raise NoRoomError(f"the microbatches of module {module.name} in canonical order exceed its memory")

    def held(batch: I64) -> Memory | None:
        return items.step_memory(bin_totals(items.sizes, batch, count, padded=True))

    def slowest(option: tuple[I64, Balancer]) -> int | None:
        times = bin_totals(items.loads, option[0], count, padded=True)
        try:
            rank = option[1](times, ranks, microbatches, held(option[0]))
        except (BinMemoryError, NoRoomError):
            return None
        return int(bin_loads(times, rank, ranks).max())

    spread = [(time, number) for number, time in enumerate(map(slowest, kept)) if time is not None]
    if not spread:
        raise NoRoomError(f"the microbatches of module {module.name} exceed what a rank holds of a step")
    batch, balancer = kept[min(spread)[1]]
    first = np.zeros(count, np.int64)
    first[batch[::-1]] = items.sample[::-1]
    phase = Phase(
        name=module.name,
        loads=bin_totals(items.loads, batch, count, padded=True),
        sample=first,
        constant_ns=microbatches * module.cost.microbatch_ns,
        balancer=balancer,
        capacity=microbatches,
        memory=held(batch),
    )
    at_home = bin_totals(items.loads, canonical, count, padded=True).reshape(ranks, -1).sum(axis=1)
    return ModulePhase(items, phase, batch, phase.constant_ns + at_home)


def phase_links(phases: Sequence[ModulePhase], row_bytes: int) -> tuple[Link, ...]:
    """What goes between the backbone and each of the other phases; a row has `row_bytes` bytes."""
    backbone = next(p for p in phases if p.items.module.kind is ModuleKind.BACKBONE)
    links = []
    for phase in phases:
        if phase is backbone:
            continue
        here = phase.phase.name, phase.unit
        there = backbone.phase.name, backbone.unit[phase.items.sequence]
        source, target = (here, there) if phase.items.module.kind is ModuleKind.ENCODER else (there, here)
        links.append(Link(source[0], target[0], source[1], target[1], phase.items.rows, row_bytes))
    return tuple(links)
