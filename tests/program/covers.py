"""Some of many combinations, in which any two choices meet."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Factors = Mapping[str, Sequence[Any]]
MOST = 6000
"""Combinations that are looked at."""


def cover(factors: Factors, fits: Callable[[Row], bool]) -> list[Row]:
    """Rows in which any two values of two factors meet, if they can; the same every time."""
    everything = list(product(*factors.values()))
    drawn = random.Random(0).sample(everything, min(MOST, len(everything)))
    candidates = [row for values in drawn if fits(row := dict(zip(factors, values, strict=True)))]
    meetings = [frozenset(combinations(row.items(), 2)) for row in candidates]
    left, rows = frozenset[Any]().union(*meetings), list[Row]()
    while left:
        best = max(range(len(candidates)), key=lambda i: len(meetings[i] & left))
        rows.append(candidates[best])
        left -= meetings[best]
    return rows
