"""Arrangements of a step's samples and images, and the routings between them."""

import heapq

import numpy as np

from dataserver.planning.jobspec import ModuleSpec, Stream
from dataserver.planning.placing import Placement
from dataserver.planning.plan import Arrangement, Routing
from dataserver.planning.samples import I64, Bool, StepSamples, Task


def arrange_samples(module: ModuleSpec, samples: StepSamples, sequence: I64, placement: Placement) -> Arrangement:
    """The backbone's arrangement, `sequence` int64 [n] being the sequence of each sample."""
    ranks, waves, slots = placement.rank[sequence], placement.wave[sequence], placement.slot[sequence]
    order = np.lexsort((np.arange(len(sequence)), slots, waves, ranks))
    return _arrangement(module.name, order, ranks[order], waves[order], slots[order], samples.tokens[order])


def arrange_images(module: ModuleSpec, images: I64, rank: I64, wave: I64, rows: I64) -> Arrangement:
    """The arrangement of an encoder or generator.

    Args:
        module: the encoder or generator.
        images: int64 [k], the images it handles, in backbone order.
        rank: int64 [k], the rank of the module that gets each.
        wave: int64 [k], the wave of each.
        rows: int64 [k], rows of its output (embeddings) or input (conditions).
    """
    order = np.lexsort((np.arange(len(images)), wave, rank))
    position = _within_groups(rank[order], wave[order], np.ones(len(order), np.int64))
    return _arrangement(module.name, images[order], rank[order], wave[order], position, rows[order])


def spread_images(module: ModuleSpec, loads: I64, backbone_rank: I64, wave: I64, dp: int, islands: int) -> I64:
    """The rank of each image: wave by wave, longest first, to the rank of its island that would finish it first.

    Finish times run on from wave to wave, so that the largest image of every wave does not always meet the same rank.

    Args:
        module: the encoder or generator.
        loads: int64 [k], nanoseconds of each image.
        backbone_rank: int64 [k], where each image's sample is.
        wave: int64 [k].
        dp: backbone ranks.
        islands: independent groups of ranks; it divides both degrees.
    """
    width = module.dp // islands
    island = backbone_rank * islands // dp
    rank = island * width
    if width == 1:
        return rank
    finish = [[(0, r) for r in range(i * width, (i + 1) * width)] for i in range(islands)]
    for image in np.lexsort((np.arange(len(loads)), -loads, wave)).tolist():
        time, chosen = finish[island[image]][0]
        rank[image] = chosen
        heapq.heapreplace(finish[island[image]], (time + int(loads[image]), chosen))
    return rank


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
    arrays = (wave, source, source_start, wave, target, target_start, rows)
    return Routing(*names, *(a[order] for a in arrays))
