"""How much of each dataset all steps before a step take: weights, added up over the steps.

Weights are constant in pieces of steps. Where each piece begins, what was taken before it is known in integers, so any
step is found by one look at its piece. What each dataset should have had by then is known besides, in units of 2^-64,
and is made up for in the next piece: however often weights change, no dataset loses the fractions of a sample.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Final

from dataserver.planning.job.fields import Stream

_BITS: Final = 64
"""Bits of a fraction of a unit."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Steps in which no weight changes."""

    weights: Sequence[int]
    total: int
    taken: Sequence[int]
    """Units that steps before the piece took of each dataset."""
    due: Sequence[int]
    """What they should have taken, in fractions of units."""


class Mixture:
    """Where the steps of a stream begin on the axes of its datasets (design law 2)."""

    def __init__(self, stream: Stream) -> None:
        """Add up the pieces of the weights."""
        self._packed = stream.packing.enabled
        self._step = Fraction(stream.global_batch)
        """Units of a step, of all datasets: samples, or nominal tokens with packing."""
        if self._packed:
            self._step *= Fraction(stream.packing.fill) * stream.seq_len
        self.first_steps: list[int] = []
        """The first step of each piece."""
        self._pieces: list[_Piece] = []
        nothing = [0] * len(stream.datasets)
        taken, due = nothing, nothing
        for step, texts in stream.mixture():
            if self._pieces:
                piece, steps = self._pieces[-1], step - self.first_steps[-1]
                taken, due = self._taken(piece, steps), self._due(piece, steps)
            weights = _integers(texts)
            self._pieces.append(_Piece(weights, sum(weights), taken, due))
            self.first_steps.append(step)

    def bounds(self, step: int) -> Sequence[int]:
        """Units that all steps before a step take of each dataset; no bound ever falls."""
        number = bisect_right(self.first_steps, step) - 1
        return self._taken(self._pieces[number], step - self.first_steps[number])

    def takes(self, dataset: int) -> bool:
        """Whether any step takes samples of a dataset."""
        return any(piece.weights[dataset] for piece in self._pieces)

    def _due(self, piece: _Piece, steps: int) -> list[int]:
        """What each dataset should have given after so many steps of a piece, in fractions of units."""
        whole = (steps << _BITS) * self._step.numerator
        each = piece.total * self._step.denominator
        return [due + whole * weight // each for due, weight in zip(piece.due, piece.weights, strict=True)]

    def _taken(self, piece: _Piece, steps: int) -> list[int]:
        if self._packed:
            return [due >> _BITS for due in self._due(piece, steps)]
        return self._samples(piece, steps * self._step.numerator)

    @staticmethod
    def _samples(piece: _Piece, left: int) -> list[int]:
        """As `_taken` without packing, where all steps hold the same number of samples: after so many of a piece.

        Each dataset takes its share, rounded down, of what the ones before it leave, and what it is owed from earlier
        pieces. What is left never falls while steps go on, so no bound ever falls either, and the sum is exact.
        """
        owed = [due - (taken << _BITS) for due, taken in zip(piece.due, piece.taken, strict=True)]
        weight_left = piece.total
        owed_left = sum(debt for debt, weight in zip(owed, piece.weights, strict=True) if weight)
        bounds = []
        for debt, weight, before in zip(owed, piece.weights, piece.taken, strict=True):
            taken = 0
            if weight:
                share = debt * weight_left + ((left << _BITS) - owed_left) * weight
                taken = min(left, max(0, share // (weight_left << _BITS)))
                left, weight_left, owed_left = left - taken, weight_left - weight, owed_left - debt
            bounds.append(before + taken)
        return bounds


def _integers(weights: Sequence[str]) -> list[int]:
    """Integers in the proportions of decimal numbers."""
    fractions = [Fraction(weight) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * scale) for fraction in fractions]
