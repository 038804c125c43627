"""What samples of one sequence have to be: parts of documents that stay together, and budgets of items."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import Stream
from dataserver.planning.stream.samples import IMAGE, StepSamples, Task, ranges

UNLIMITED = 2**62
"""Items of a kind that has no budget."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRules:
    """The rules of a step of n samples."""

    tokens: I64
    """Tokens of each sample, int64 [n]."""
    follows: I64
    """int64 [n]: 1 of a part that follows the one before it in its document and is to share its sequence, else 0."""
    items: I64
    """int64 [n, 3]: images, clips and videos that are understood."""
    budget: I64
    """int64 [3]: most of each in a sequence."""

    @classmethod
    def of(cls, stream: Stream, samples: StepSamples) -> Self | None:
        """The rules of a step; None where sequences may hold whatever fits."""
        has_budget = any(stream.packing.budget)
        together = [spec.documents is not None and spec.documents.together for spec in stream.datasets]
        if not has_budget and (samples.parts is None or not any(together)):
            return None
        follows = np.zeros(len(samples), np.int64)
        if samples.parts is not None and len(samples):
            names = np.stack([samples.dataset.astype(np.int64), samples.epoch, samples.sample.astype(np.int64)])
            same = (names[:, 1:] == names[:, :-1]).all(axis=0)
            next_part = samples.parts[1:, 0] == samples.parts[:-1, 0] + 1
            follows[1:] = same & next_part & np.array(together)[samples.dataset[1:]]
        budget = [UNLIMITED if most is None else most for most in stream.packing.budget]
        return cls(samples.tokens, follows, _items(samples), np.array(budget, np.int64))

    @property
    def has_budget(self) -> bool:
        """Whether there is a budget of anything."""
        return bool((self.budget < UNLIMITED).any())

    def bundles(self, capacity: int) -> I64:
        """The bundle of each sample, int64 [n], numbered from 0: samples of one bundle share a sequence.

        From the first part on, a bundle takes the parts that follow as long as they fit `capacity` tokens and the
        budget. All other samples are alone in theirs.
        """
        bundle = np.arange(len(self.tokens))
        number, tokens, items = -1, 0, self.items[:0].sum(axis=0)
        if not self.follows.any():
            return bundle
        for i, follows in enumerate(self.follows.tolist()):
            longer, more = tokens + int(self.tokens[i]), items + self.items[i]
            if not follows or longer > capacity or (more > self.budget).any():
                number, longer, more = number + 1, int(self.tokens[i]), self.items[i]
            bundle[i], tokens, items = number, longer, more
        return bundle

    def items_of(self, group: I64) -> I64:
        """Images, clips and videos of groups of samples, int64 [groups, 3]."""
        found = np.zeros((int(group.max(initial=-1)) + 1, 3), np.int64)
        np.add.at(found, group, self.items)
        return found

    def hold(self, sequence: I64, capacity: int) -> bool:
        """Whether sequences, int64 [n], keep bundles together and are within the budget."""
        bundle = self.bundles(capacity)
        first = np.searchsorted(bundle, bundle, "left")
        within = (self.items_of(sequence) <= self.budget).all()
        return bool(within and np.array_equal(sequence[first], sequence))


def _items(samples: StepSamples) -> I64:
    """Images, clips and videos of each sample that are understood, int64 [n, 3]; those to generate take no tokens."""
    found = np.zeros((len(samples), 3), np.int64)
    of = samples.image_sample
    modality = np.full(len(of), IMAGE, np.uint8) if samples.image_modality is None else samples.image_modality
    first, end = samples.images_with(Task.UNDERSTANDING)
    counted = ranges(first, end - first)
    np.add.at(found, (of[counted], modality[counted].astype(np.int64)), 1)
    return found
