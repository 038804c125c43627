"""Documents that are generated: which of their images is the target, and what is read before it.

A sample that is no pair may have as target any of its images that has text before it and that, with all that stands
before it, fits a sequence. Each epoch draws one of these; the document ends with it, and the rest is left out. Clips
and videos are read, and never generated.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Self

import numpy as np

from dataserver.planning import I64, U64, Bool
from dataserver.planning.job.fields import Sizing, Stream
from dataserver.planning.stream.item_sizes import (
    GENERATION_EXTRA,
    IMAGE_EXTRA,
    is_pair,
    item_marks,
    item_tokens,
    picked_media,
)
from dataserver.planning.stream.randomness import Operator, draw
from dataserver.planning.stream.samples import IMAGE, SampleSizes, ranges, row_sums, sums_before


def generation_share(stream: Stream) -> Fraction:
    """The share of samples that are generated where they may be, as nominal tokens count it."""
    return Fraction(stream.generation.ratio).limit_denominator(1 << 20)


def mixed_tokens(share: Fraction, understood: I64, generated: I64) -> I64:
    """Nominal tokens of samples that may be generated, int64 [n], from those in either task: their mean over the draw,
    rounded down."""
    mixed: I64 = (understood * (share.denominator - share.numerator) + generated * share.numerator) // share.denominator
    return mixed


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """The images that n samples may have as targets, among all their m images."""

    offsets: I64
    """int64 [n + 1]: first image of each sample."""
    texts: I64
    """int64 [m]: text tokens of its sample before each image."""
    tokens: I64
    """int64 [m]: backbone tokens of its sample, if the image is the target."""
    allowed: Bool
    """bool [m]: whether it may be."""

    @property
    def counts(self) -> I64:
        """int64 [n]: how many each sample has."""
        return row_sums(self.allowed, self.offsets)

    def mean_tokens(self) -> I64:
        """Tokens of each sample that is generated: their mean over its targets, rounded down; 0 without. int64 [n]."""
        found: I64 = row_sums(self.tokens * self.allowed, self.offsets) // np.maximum(self.counts, 1)
        return found

    def most_tokens(self) -> I64:
        """Tokens of each sample up to its last target; 0 without. int64 [n]."""
        last = self.chosen(np.full(len(self.offsets) - 1, np.iinfo(np.uint64).max))
        return np.where(last >= 0, np.append(self.tokens, 0)[last], 0)

    def chosen(self, words: U64) -> I64:
        """The image of each sample that a word of 64 random bits, uint64 [n], chooses; -1 where none may be chosen."""
        counts = self.counts
        number = ((words >> np.uint64(32)) * counts.astype(np.uint64)) >> np.uint64(32)
        before = np.cumsum(counts) - counts
        has = counts > 0
        found = np.full(len(counts), -1, np.int64)
        found[has] = np.flatnonzero(self.allowed)[before[has] + number[has].astype(np.int64)]
        return found


@dataclass(frozen=True, slots=True)
class DocumentTargets:
    """How a stream generates images of documents: what targets and nominal tokens depend on."""

    share: Fraction
    query_tokens: int
    seq_len: int

    @classmethod
    def of(cls, stream: Stream) -> Self | None:
        """The rules of a stream; None where pairs alone are generated."""
        if not stream.generation.interleaved:
            return None
        return cls(generation_share(stream), stream.generation.query_tokens, stream.seq_len)

    def key(self) -> list[Any]:
        """What tells it from others."""
        return [str(self.share), self.query_tokens, self.seq_len]

    def find(self, sizing: Sizing, sizes: SampleSizes) -> Targets:
        """The targets of some samples."""
        if sizes.image_texts is None:
            raise ValueError("images of documents are generated, and nothing says which text stands before each")
        at, counts = sizes.image_offsets, np.diff(sizes.image_offsets)
        taken = item_tokens(sizes, sizing) + item_marks(sizes, sizing) + IMAGE_EXTRA
        sums = sums_before(taken)
        before = sums[:-1] - np.repeat(sums[at[:-1]], counts)
        tokens = GENERATION_EXTRA + self.query_tokens + sizes.image_texts + before
        allowed = (sizes.image_texts > 0) & (tokens <= self.seq_len) & np.repeat(~is_pair(sizes), counts)
        if sizes.image_modality is not None:
            allowed &= sizes.image_modality == IMAGE
        return Targets(at, sizes.image_texts, tokens, allowed)

    def nominal_tokens(self, targets: Targets, understood: I64) -> I64:
        """Nominal tokens of some samples, int64 [n], from those in understanding, cut to a sequence."""
        mixed = mixed_tokens(self.share, understood, targets.mean_tokens())
        return np.where(targets.counts > 0, mixed, understood)


def images_up_to(sizes: SampleSizes, target: I64) -> SampleSizes:
    """Samples without the images behind their targets, int64 [n]; those whose target is -1 keep all."""
    first, end = sizes.image_offsets[:-1], sizes.image_offsets[1:]
    counts = np.where(target >= 0, target + 1, end) - first
    images = ranges(first, counts)
    offsets = sums_before(counts)
    rows, columns = sizes.image_rows[images], sizes.image_columns[images]
    return replace(sizes, image_offsets=offsets, image_rows=rows, image_columns=columns, **picked_media(sizes, images))


def draw_targets(targets: Targets, seed: int, dataset: int, epoch: int, sample: U64, parts: I64 | None) -> I64:
    """The target of each sample of one dataset and epoch, if it is generated: an image, or -1. int64 [n].

    Args:
        targets: of the samples.
        seed: the job's.
        dataset: key of the dataset (`dataset_key`).
        epoch: of the dataset.
        sample: uint64 [n].
        parts: as in `SampleSizes`; each part of a document has a draw of its own.
    """
    keyed = draw(seed, Operator.TASK, dataset, epoch, sample)
    if parts is not None:
        keyed = keyed + parts[:, 0].astype(np.uint64)  # beyond 2^64 it begins with 0 again
    return targets.chosen(draw(seed, Operator.TARGET, dataset, epoch, keyed))
