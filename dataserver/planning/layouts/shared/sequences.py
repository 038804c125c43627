"""The sequences of a step: which samples share one, and how many microbatches of every rank hold them all."""

import numpy as np

from dataserver.planning import I64
from dataserver.planning.balancing import bin_loads
from dataserver.planning.costs.model import backward_ns, forward_ns, items_ns
from dataserver.planning.job.fields import ModuleKind, PackingPolicy
from dataserver.planning.job.identity import Job
from dataserver.planning.plan.arranging import module_images
from dataserver.planning.plan.plan import ArrangedStep
from dataserver.planning.stream.packing import (
    balanced,
    balanced_within,
    best_fit_decreasing,
    best_fit_within,
    number_by_first,
    one_per_sequence,
)
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.sequence_rules import SequenceRules


def pack_step(job: Job, samples: StepSamples, at_least: int = 0) -> tuple[I64, int]:
    """Pack the samples of a step as the stream and the backbone's policy say.

    A sequence holds `sequence_tokens`. Each rank has at least `at_least` microbatches, where memory asks for more than
    the samples do.

    Returns:
        int64 [n]: the sequence of each sample, numbered from 0 in the order of their first samples; and the
        microbatches of each rank, equal for all.

    Raises:
        ValueError: a sample does not fit a sequence.
    """
    slots = job.spec.execution.backbone.dp * job.spec.execution.microbatch
    return pack_sequences(job, samples, sequence_tokens(job), slots, at_least)


def sequence_tokens(job: Job) -> int:
    """Tokens that a sequence may hold: `seq_len`, or what the memory of the backbone holds if that is less."""
    memory = job.spec.execution.backbone.memory
    return job.stream.seq_len if memory is None else min(job.stream.seq_len, memory.units)


def pack_sequences(job: Job, samples: StepSamples, capacity: int, slots: int, at_least: int = 0) -> tuple[I64, int]:
    """Pack as `pack_step` does, into sequences of at most `capacity` tokens.

    Here `slots` is the number of sequences that one microbatch of all ranks together holds.
    """
    stream, tokens, backbone = job.stream, samples.tokens, job.spec.execution.backbone
    if not stream.packing.enabled:
        return one_per_sequence(tokens), max(at_least, -(-max(stream.global_batch, len(tokens)) // slots))
    rules = SequenceRules.of(stream, samples)
    if rules is not None:
        return _packed_by_rules(job, samples, rules, capacity, slots, at_least)
    sequence = best_fit_decreasing(tokens, capacity)
    microbatches = max(at_least, -(-max(stream.global_batch, int(sequence.max(initial=-1)) + 1) // slots))
    if backbone.packing is PackingPolicy.BALANCED:
        sequence = balanced(tokens, sample_ns(job, samples), capacity, microbatches * slots)
    return sequence, microbatches


def _packed_by_rules(
    job: Job, samples: StepSamples, rules: SequenceRules, capacity: int, slots: int, at_least: int
) -> tuple[I64, int]:
    """As `pack_sequences`, where parts of documents share sequences, or sequences have a budget of items."""
    bundle = rules.bundles(capacity)
    count = int(bundle.max(initial=-1)) + 1
    tokens, items = bin_loads(samples.tokens, bundle, count), rules.items_of(bundle)
    if rules.has_budget:
        sequence = best_fit_within(tokens, items, capacity, rules.budget)
    else:
        sequence = best_fit_decreasing(tokens, capacity)
    fewest = max(job.stream.global_batch, int(sequence.max(initial=-1)) + 1)
    microbatches = max(at_least, -(-fewest // slots))
    if job.spec.execution.backbone.packing is PackingPolicy.BALANCED:
        times = bin_loads(sample_ns(job, samples), bundle, count)
        if rules.has_budget:
            sequence = balanced_within(tokens, times, items, capacity, rules.budget, microbatches * slots, sequence)
        else:
            sequence = balanced(tokens, times, capacity, microbatches * slots)
    return number_by_first(sequence[bundle]), microbatches


def sample_ns(job: Job, samples: StepSamples) -> I64:
    """What each sample costs a rank of the backbone, by which sequences are balanced. int64 [n].

    Its forward there; where ranks run the encoders too, forward and backward in all.
    """
    execution = job.spec.execution
    times = forward_ns(execution.backbone.cost, samples.tokens)
    if not execution.identity_routing:
        return times
    times = times + backward_ns(execution.backbone.cost, times)
    for encoder in execution.of_kind(ModuleKind.ENCODER):
        images = module_images(job.spec, encoder, samples)
        own = items_ns(encoder.cost, samples.patches[images], samples.depths(images))
        times += bin_loads(own + backward_ns(encoder.cost, own), samples.image_sample[images], len(samples))
    return times


def sequence_of_samples(plan: ArrangedStep, backbone: str) -> I64:
    """The sequence of each sample of a plan, numbered by rank, microbatch and slot. int64 [n]."""
    found = plan.arrangement(backbone)
    place = (found.rank * plan.num_microbatches + found.microbatch) * plan.sequences_per_microbatch + found.slot
    sequence = np.empty(len(place), np.int64)
    sequence[found.item] = np.unique(place, return_inverse=True)[1]
    return sequence


def fill_percent(job: Job, plan: ArrangedStep) -> dict[str, float]:
    """How full the sequences in use are, by `layout.FIGURES`; nothing where the stream does not pack. For people."""
    if not job.stream.packing.enabled:
        return {}
    used = max(_sequences_in_use(job, plan), 1)
    return {"fill_percent": 100 * int(plan.samples.tokens.sum()) / (used * job.stream.seq_len)}


def empty_percent(job: Job, plan: ArrangedStep) -> dict[str, float]:
    """How many sequence slots hold nothing, by `layout.FIGURES`. For people."""
    slots = job.spec.execution.backbone.dp * plan.num_microbatches * plan.sequences_per_microbatch
    return {"empty_sequences_percent": 100 - 100 * _sequences_in_use(job, plan) / slots}


def _sequences_in_use(job: Job, plan: ArrangedStep) -> int:
    return int(sequence_of_samples(plan, job.spec.execution.backbone.name).max(initial=-1)) + 1
