"""Keyed randomness: raw 64-bit words of Philox 4x64-10, addressed by what they are for.

A draw is a pure function of (seed, operator, dataset, epoch, sample, index), never of a worker, a rank or the order of
arrival. The mapping, which any language can repeat:

    key     = (seed, operator)
    counter = (index // 4, sample, epoch, dataset)      # least significant word first
    word    = output[index % 4]

Philox 4x64-10 is from Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). numpy has the generator
but no way to evaluate many counters at once, which is what keyed draws need; the tests hold this one against numpy's.
"""

import hashlib
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]


class Operator(IntEnum):
    """What a draw is for. Numbers are part of the public contract: never reuse or change one."""

    SHARD_ORDER = 1
    """Order of the shards of one epoch; the `sample` word is the shard number."""
    SAMPLE_ORDER = 2
    """Order of the samples within a shuffle window."""
    TASK = 3
    """Whether an image-text pair is understood or generated."""
    DIFFUSION_NOISE = 4
    """Noise added to a target image."""
    DIFFUSION_TIME = 5
    """Diffusion time of a target image."""
    PLAN_SEARCH = 6
    """Trials of the planner's search; the `sample` word is the step."""
    IMAGE_TRANSFORM = 7
    """Transforms of a sample's images, four words for each transform of each image."""
    CAPTION = 8
    """Which of several captions a sample is read with."""
    PART_ORDER = 9
    """Order of the parts of a document that is split; the `sample` word is the document's of `SAMPLE_ORDER` plus the
    number of the part, which is at least 1."""
    TARGET = 10
    """Which image of a document is generated; the `sample` word is the document's of `TASK` plus the number of the
    part, 0 where it is whole."""


def dataset_key(name: str) -> int:
    """The `dataset` word of a dataset: the first 8 bytes (little-endian) of the SHA-256 of its logical name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def draw(seed: int, operator: Operator, dataset: int, epoch: int, samples: U64) -> U64:
    """The first word of each sample's stream.

    Args:
        seed: the job's seed, in [0, 2**64).
        operator: what the words are for.
        dataset: `dataset_key` of the dataset.
        epoch: epoch of the dataset.
        samples: uint64 [n].

    Returns:
        uint64 [n].
    """
    from dataserver.planning.kernels.draws import first_words

    return first_words(seed, int(operator), dataset, epoch, samples)


def draws(seed: int, operator: Operator, dataset: int, epoch: int, sample: int, count: int) -> U64:
    """The first `count` words of one sample's stream, uint64 [count]."""
    from dataserver.planning.kernels.draws import words_of

    return words_of(seed, int(operator), dataset, epoch, sample, count)
