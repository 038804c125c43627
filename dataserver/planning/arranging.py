"""Arrangements of a step's samples and images, and the routings between them."""

import numpy as np

from dataserver.planning.balancing import in_runs, longest_first
from dataserver.planning.costs import forward_ns
from dataserver.planning.jobspec import BalancePolicy, ModuleKind, ModuleSpec, Stream
from dataserver.planning.packing import number_by_first
from dataserver.planning.plan import Arrangement, Routing
from dataserver.planning.samples import I64, Bool, StepSamples, Task

TASK_OF = {ModuleKind.ENCODER: Task.UNDERSTANDING, ModuleKind.GENERATOR: Task.GENERATION}
"""The task whose images a module handles."""


def spread(policy: BalancePolicy, loads: I64, num_bins: int, capacity: int | None = None) -> I64:
    """The bin of each item by the policy. int64 [n]."""
    if policy is BalancePolicy.NONE:
        return in_runs(len(loads), num_bins)
    return longest_first(loads, num_bins, capacity)


def place_sequences(
    policy: BalancePolicy, loads: I64, dp: int, num_microbatches: int, microbatch: int
) -> tuple[I64, I64, I64]:
    """Rank, microbatch and slot of each sequence, int64 [s] each.

    Ranks hold equal counts, empty slots counted. The microbatches of a rank stand in the canonical order of their first
    sequences: balancing leaves them sorted by load, which is a bad order for a pipeline.
    """
    rank = spread(policy, loads, dp, num_microbatches * microbatch)
    wave, slot = np.zeros_like(rank), np.zeros_like(rank)
    for r in range(dp):
        mine = np.flatnonzero(rank == r)
        wave[mine] = number_by_first(spread(policy, loads[mine], num_microbatches, microbatch))
        for w in range(num_microbatches):
            here = mine[wave[mine] == w]
            slot[here] = np.arange(len(here))
    return rank, wave, slot


def arrange_samples(
    module: ModuleSpec, samples: StepSamples, sequence: I64, rank: I64, wave: I64, slot: I64
) -> Arrangement:
    """The backbone's arrangement.

    Args:
        module: the backbone.
        samples: the step's samples.
        sequence: int64 [n], the sequence of each sample.
        rank: int64 [s], where each sequence is.
        wave: int64 [s].
        slot: int64 [s].
    """
    ranks, waves, slots = rank[sequence], wave[sequence], slot[sequence]
    order = np.lexsort((np.arange(len(sequence)), slots, waves, ranks))
    return _arrangement(module.name, order, ranks[order], waves[order], slots[order], samples.tokens[order])


def arrange_images(
    policy: BalancePolicy, module: ModuleSpec, images: I64, sizes: I64, rows: I64, wave: I64, num_microbatches: int
) -> Arrangement:
    """Spread the images of each wave over the ranks of an encoder or generator.

    Args:
        policy: how.
        module: the encoder or generator.
        images: int64 [k], the images it handles, in backbone order.
        sizes: int64 [k], patches of each.
        rows: int64 [k], rows of its output (embeddings) or input (conditions).
        wave: int64 [k], the wave of each.
        num_microbatches: waves of the step.
    """
    rank = np.zeros(len(images), np.int64)
    loads = forward_ns(module.cost, sizes)
    for w in range(num_microbatches):
        here = np.flatnonzero(wave == w)
        rank[here] = spread(policy, loads[here], module.dp)
    order = np.lexsort((np.arange(len(images)), wave, rank))
    position = _within_groups(rank[order], wave[order], np.ones(len(order), np.int64))
    return _arrangement(module.name, images[order], rank[order], wave[order], position, rows[order])


def _arrangement(name: str, item: I64, rank: I64, wave: I64, slot: I64, rows: I64) -> Arrangement:
    return Arrangement(name, item, rank, wave, slot, _within_groups(rank, wave, rows))


def _within_groups(rank: I64, wave: I64, rows: I64) -> I64:
    """Running sum of rows before each item among the items of the same (rank, wave), which stand together."""
    before = np.cumsum(rows) - rows
    first = np.ones(len(rows), np.bool_)
    first[1:] = (rank[1:] != rank[:-1]) | (wave[1:] != wave[:-1])
    base = before[first][np.cumsum(first) - 1] if len(rows) else before
    return (before - base).astype(np.int64)


def images_in_order(samples: StepSamples, backbone: Arrangement, of_task: Task) -> tuple[I64, I64, I64]:
    """The images of one task in backbone order, with the backbone rank and wave of each. int64 [k] each."""
    counts = np.diff(samples.image_offsets)[backbone.item]
    firsts = samples.image_offsets[backbone.item]
    total = int(counts.sum())
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    image = np.repeat(firsts, counts) + within
    keep: Bool = np.repeat(samples.task[backbone.item] == of_task, counts)
    return image[keep], np.repeat(backbone.rank, counts)[keep], np.repeat(backbone.microbatch, counts)[keep]


def image_rows(stream: Stream, samples: StepSamples, images: I64, task: Task) -> I64:
    """Rows that each image contributes to the routing: embeddings, or conditions. int64 [k]."""
    if task is Task.GENERATION:
        return np.full(len(images), stream.generation.query_tokens, np.int64)
    rows: I64 = samples.patches[images] // stream.sizing.merge**2
    return rows


def route(
    backbone: Arrangement, other: Arrangement, images: I64, rank: I64, wave: I64, rows: I64, to_backbone: bool
) -> Routing:
    """The routing between the backbone and an arrangement of images.

    Args:
        backbone: the backbone's arrangement.
        other: the encoder's (to_backbone) or the generator's.
        images: int64 [k], the images in backbone order.
        rank: int64 [k], their backbone rank.
        wave: int64 [k], their wave.
        rows: int64 [k], rows of each.
        to_backbone: direction.
    """
    place = np.argsort(other.item, kind="stable")[np.searchsorted(np.sort(other.item), images)]
    here = rank, _within_groups(rank, wave, rows)
    there = other.rank[place], other.start[place]
    (source, source_start), (target, target_start) = (there, here) if to_backbone else (here, there)
    order = np.lexsort((source_start, source, wave))
    names = (other.module, backbone.module) if to_backbone else (backbone.module, other.module)
    arrays = (wave, source, source_start, target, target_start, rows)
    return Routing(*names, *(a[order] for a in arrays))
