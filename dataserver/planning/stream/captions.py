"""Which of several captions a sample is read with: a keyed draw for each sample and epoch."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dataserver.planning import I32, I64, U64
from dataserver.planning.job.fields import DatasetSpec, Stream, key_of
from dataserver.planning.stream.randomness import Operator, dataset_key, draw

CHAT_PREFIX = "chat:"
"""Before the digest of a chat template where it stands for a caption: names have no colon."""
TEXT_MARK = " text "
"""Stands between a caption and the key of the transforms of its texts."""
_UNITS = 1 << 20
"""In which a mean counts shares."""


def text_key(caption: str, transforms: str) -> str:
    """What tells the texts of a caption apart that were transformed. `transforms` is their key, empty for none."""
    return f"{caption}{TEXT_MARK}{transforms}" if transforms else caption


@dataclass(frozen=True)
class Captions:
    """The captions of a dataset in a job; alone or with others."""

    names: tuple[str, ...] = ("own",)
    """Names as the index has them; `own` is the text that samples have without a named one."""
    shares: tuple[Fraction, ...] = (Fraction(1),)
    """The chance of each; they sum to one."""
    cut_at_turn: bool = False
    """Whether a conversation that is too long is cut behind an answer; else it is left out."""

    @classmethod
    def of(cls, spec: DatasetSpec) -> "Captions":
        """Those of a dataset of a job."""
        if spec.conversations is not None:
            chats = spec.conversations
            return cls((CHAT_PREFIX + chats.template,), cut_at_turn=chats.cut_at is not None)
        key = key_of(spec.text_transforms or ())
        if spec.captions is None:
            return cls((text_key(spec.caption or OWN_CAPTION.names[0], key),))
        return cls(tuple(text_key(caption.name, key) for caption in spec.captions), spec.caption_shares())

    @property
    def are_drawn(self) -> bool:
        """Whether a caption is drawn from several."""
        return len(self.names) > 1

    @property
    def are_chats(self) -> bool:
        """Whether samples are conversations, whose only text is what a template renders."""
        return self.names[0].startswith(CHAT_PREFIX)

    @property
    def transformed(self) -> tuple[str, ...]:
        """Those of `names` whose texts are transformed."""
        return tuple(name for name in self.names if TEXT_MARK in name)

    def key(self) -> list[str]:
        """What shard statistics depend on."""
        return [f"{name} {share}" for name, share in zip(self.names, self.shares, strict=True)]

    def expected(self, tokens: I64) -> I64:
        """The mean over the draw, rounded up, of tokens [captions, n]. int64 [n].

        It is positive wherever a caption has tokens.
        """
        weights = np.array([max(1, share * _UNITS // 1) for share in self.shares], np.int64)
        found: I64 = -(-(weights @ tokens) // weights.sum())
        return found

    def drawn(self, seed: int, dataset: int, epoch: int, sample: U64) -> NDArray[np.intp]:
        """The position in `names` of each sample's caption in an epoch. intp [n].

        Args:
            seed: the job's.
            dataset: key of the dataset (`dataset_key`).
            epoch: of the dataset.
            sample: uint64 [n].
        """
        words = draw(seed, Operator.CAPTION, dataset, epoch, sample)
        return np.searchsorted(self._bounds, words, side="right")

    @cached_property
    def _bounds(self) -> U64:
        """The words at which the second caption begins, and those after it."""
        sums = [sum(self.shares[: i + 1], Fraction(0)) for i in range(len(self.shares) - 1)]
        return np.array([int(share * 2**64) for share in sums], np.uint64)


OWN_CAPTION = Captions()
"""What jobs have that name no caption."""


def captions_of(stream: Stream, dataset: I32, epoch: I64, sample: U64) -> list[str]:
    """The names of the captions of n samples.

    Args:
        stream: the job's stream.
        dataset: int32 [n], positions in its list.
        epoch: int64 [n], of the dataset.
        sample: uint64 [n].
    """
    found = [""] * len(sample)
    groups: dict[tuple[int, int], list[int]] = {}
    for i, of in enumerate(zip(dataset.tolist(), epoch.tolist(), strict=True)):
        groups.setdefault(of, []).append(i)
    for (number, when), at in groups.items():
        spec = stream.datasets[number]
        captions = Captions.of(spec)
        drawn = [0] * len(at)
        if captions.are_drawn:
            drawn = captions.drawn(stream.seed, dataset_key(spec.name), when, sample[at]).tolist()
        for i, chosen in zip(at, drawn, strict=True):
            found[i] = captions.names[chosen]
    return found
