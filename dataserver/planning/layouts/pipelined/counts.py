"""How many microbatches a pipelined step takes, and the sequences that go with each number."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from dataserver.planning import I64
from dataserver.planning.balancing import bin_loads
from dataserver.planning.job.fields import ModuleKind, ModuleSpec, PackingPolicy, Schedule
from dataserver.planning.job.identity import Job
from dataserver.planning.job.limits import most_microbatches
from dataserver.planning.layouts.pipelined.attempts import Attempt, attempt
from dataserver.planning.layouts.pipelined.options import PipelinedOptions
from dataserver.planning.layouts.pipelined.packed import PackedStep
from dataserver.planning.layouts.pipelined.parity_packing import even_images
from dataserver.planning.layouts.shared.sequences import pack_sequences, sequence_tokens
from dataserver.planning.plan.arranging import module_images
from dataserver.planning.plan.limits import check_microbatches
from dataserver.planning.stream.packing import one_per_sequence
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.sequence_rules import SequenceRules


def sample_sizes(job: Job, samples: StepSamples, module: ModuleSpec) -> I64:
    """Tokens or patches of each sample in a module. int64 [n]."""
    if module.kind is ModuleKind.BACKBONE:
        return samples.tokens
    images = module_images(job.spec, module, samples)
    return bin_loads(samples.patches[images], samples.image_sample[images], len(samples))


@dataclass(frozen=True, slots=True)
class Counts:
    """Attempts at one step with more and more microbatches."""

    job: Job
    step: int
    samples: StepSamples
    parity: bool = False
    """Whether all ranks of a wave must have images, or none."""
    memory_packs: bool = True
    """Whether sequences are no longer than what the memory of the backbone holds; else `seq_len` alone limits them."""

    def ladder(self) -> Iterator[PackedStep]:
        """Yield the step with as many microbatches as the samples need, and 1.5, 2, 3, 4, 6, 8, ... times as many.

        Neither numbers nor sequences depend on memory. It ends where more microbatches would not be smaller.
        """
        free = replace(self, memory_packs=False)
        packed = free._packed(1, alone=False)
        fewest = packed.num_microbatches
        yield packed
        for halves in _halves():
            finest = free._finest(packed)
            number = min(-(-fewest * halves // 2), finest)
            if packed.num_microbatches >= finest or number > free._allowed:
                return
            if number > packed.num_microbatches:
                packed = free._packed(number, alone=False)
                yield packed

    def first(self) -> Attempt:
        """Pack the step in as few microbatches as the samples need, and the memory of all ranks of each module together
        allows."""
        fewest = 1
        for module in self.job.spec.execution.modules:
            if module.memory is not None:
                total = int(sample_sizes(self.job, self.samples, module).sum())
                fewest = max(fewest, -(-total // (module.memory.units * module.dp)))
        return self._attempt(fewest, alone=False)

    def fitting(self, first: Attempt) -> Attempt:
        """Twice as many until memory holds a plan, then a step back; without plans if it holds none.

        In the end every sample is alone in a wave. Where chunks are interleaved the first stage passes over 2 x stages
        microbatches, at most, before it is done with one: so many waves from one sample to the next keep all other
        samples out.
        """
        last, too_few = first, 0
        most = len(self.samples) * (2 * self._stages if self._interleaved else 1)
        most = max(first.num_microbatches, min(most, self._allowed))
        while not (last.candidates or self._is_final(last, most)):
            too_few = last.num_microbatches
            last = self._more(last, most)
        if last.candidates and 0 < too_few < last.num_microbatches - 1:
            between = self._attempt((too_few + last.num_microbatches) // 2, last.is_alone)
            if between.candidates and too_few < between.num_microbatches < last.num_microbatches:
                return between
        return last

    def finer(self, made: Attempt) -> Attempt | None:
        """Twice as many microbatches; None where they would not be smaller."""
        if made.num_microbatches >= self._finest(made.packed) or 2 * made.num_microbatches > self._allowed:
            return None
        return self._attempt(2 * made.num_microbatches, made.is_alone)

    def _finest(self, packed: PackedStep) -> int:
        """With more microbatches none would be smaller."""
        sequences = len(self.samples) if self._divisible else packed.num_sequences
        return -(-sequences // self.job.spec.execution.backbone.dp)

    def _is_final(self, made: Attempt, most: int) -> bool:
        """Whether more microbatches would not help."""
        return made.is_alone and (made.starts.is_hopeless or made.num_microbatches >= most)

    def _more(self, made: Attempt, most: int) -> Attempt:
        """Twice as many; without packing where there are slots for all samples, or more would not divide sequences."""
        if made.starts.is_hopeless and not made.is_alone and not self._divisible:
            return self._attempt(made.num_microbatches, alone=True)
        count = min(most, 2 * made.num_microbatches)
        return self._attempt(count, made.is_alone or count * self._slots >= len(self.samples))

    def _attempt(self, at_least: int, alone: bool) -> Attempt:
        return attempt(self._packed(at_least, alone))

    def _packed(self, at_least: int, alone: bool) -> PackedStep:
        """With a multiple of the stages where chunks are interleaved; `alone`, whatever packing says."""
        sequence, count = self._sequences(at_least, alone)
        if self._interleaved and count % self._stages:
            sequence, count = self._sequences(-(-count // self._stages) * self._stages, alone)
        check_microbatches(self.job.spec, count)
        if self.parity and self.job.stream.packing.enabled and not alone:
            sequence, count = self._even(sequence, count)
        return PackedStep(self.job, self.step, self.samples, sequence, count, self.parity)

    def _even(self, sequence: I64, count: int) -> tuple[I64, int]:
        """Sequences that give the ranks equally many with images, with a microbatch more if it takes that."""
        execution = self.job.spec.execution
        (encoder,) = execution.of_kind(ModuleKind.ENCODER)
        has = sample_sizes(self.job, self.samples, encoder) > 0
        capacity, ranks = self._capacity, execution.backbone.dp
        for more in (count, count + (self._stages if self._interleaved else 1)):
            most = more * self._slots if more <= self._allowed else 0
            even = even_images(sequence, self.samples.tokens, has, capacity, ranks, execution.microbatch, most)
            rules = SequenceRules.of(self.job.stream, self.samples)
            if even is not None and (rules is None or rules.hold(even, capacity)):
                return even, more
        return sequence, count

    def _sequences(self, at_least: int, alone: bool) -> tuple[I64, int]:
        if not alone:
            return pack_sequences(self.job, self.samples, self._capacity, self._slots, at_least)
        rules = SequenceRules.of(self.job.stream, self.samples)
        sequence = one_per_sequence(self.samples.tokens) if rules is None else rules.bundles(self._capacity)
        return sequence, max(at_least, -(-len(self.samples) // self._slots))

    @property
    def _capacity(self) -> int:
        """Tokens that a sequence may hold."""
        return sequence_tokens(self.job) if self.memory_packs else self.job.stream.seq_len

    @property
    def _divisible(self) -> bool:
        """Whether packing fills all sequences there are, so that more of them are smaller."""
        return self.job.stream.packing.enabled and self.job.spec.execution.backbone.packing is PackingPolicy.BALANCED

    @property
    def _allowed(self) -> int:
        """Microbatches that a plan may have."""
        allowed = most_microbatches(self.job.spec.execution)
        return allowed // self._stages * self._stages if self._interleaved else allowed

    @property
    def _slots(self) -> int:
        """Slots of sequences in a microbatch of all ranks together."""
        return self.job.spec.execution.backbone.dp * self.job.spec.execution.microbatch

    @property
    def _interleaved(self) -> bool:
        return self.job.spec.execution.options(PipelinedOptions).schedule is Schedule.INTERLEAVED

    @property
    def _stages(self) -> int:
        return self.job.spec.execution.backbone.pp


def _halves() -> Iterator[int]:
    """Twice 1.5, 2, 3, 4, 6, 8, 12, ...: every power of two, and half as much again."""
    for power in count(1):
        yield 3 << power - 1
        yield 2 << power
