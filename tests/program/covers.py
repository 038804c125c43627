"""Some of many combinations, in which any two choices meet."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Factors = Mapping[str, Sequence[Any]]
Pair = tuple[tuple[str, Any], ...]
MOST = 6000
"""Combinations that are looked at."""


def every(factors: Factors, fits: Callable[[Row], bool]) -> list[Row]:
    """All combinations that may be, or many of them."""
    everything = list(product(*factors.values()))
    drawn = random.Random(0).sample(everything, min(MOST, len(everything)))
    return [row for values in drawn if fits(row := dict(zip(factors, values, strict=True)))]


def pairs(row: Row) -> frozenset[Pair]:
    """Any two of its choices."""
    return frozenset(combinations(row.items(), 2))


def covering(candidates: Sequence[Row]) -> list[Row]:
    """Some of these rows, in which all choices meet that meet in any; the same every time."""
    meetings = [pairs(row) for row in candidates]
    left, rows = frozenset[Pair]().union(*meetings), list[Row]()
    while left:
        best = max(range(len(candidates)), key=lambda i: len(meetings[i] & left))
        rows.append(candidates[best])
        left -= meetings[best]
    return rows


def cover(factors: Factors, fits: Callable[[Row], bool]) -> list[Row]:
    """Rows in which any two values of two factors meet, if they can; the same every time."""
    return covering(every(factors, fits))
