"""Which measured times a cost is found in: what a machine did besides must not be taken for what sizes cost.

A first step that warms up, or programs that share the machine, make single microbatches slower, and most often the
largest, which run longest. Least squares follows them. So what undisturbed ones cost is searched first, by least
trimmed squares: the fit whose nearest two thirds of the times are nearest (Rousseeuw and Van Driessen, "Computing
LTS Regression for Large Data Sets", 2006). It sees medians by size, lest the most frequent sizes decide everything,
and starts from a grid of sizes instead of by chance. All in integers: every machine finds the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from dataserver.planning.fitting.least_squares import dot, gram_matrix, nonnegative_least_squares

LEAST_ROWS: Final = 20
"""Fewer times do not tell an outlier from a term."""
LEAST_SIZES: Final = 8
"""Fewer sizes are all needed to tell the terms apart."""
MOST_SIZES: Final = 256
SIZE_BITS: Final = 5
"""Numbers that agree in so many leading binary digits (within 3 to 6 %) count as one size."""
GRID: Final = 9
"""A start goes through three of so many sizes, evenly spread."""
FINALISTS: Final = 5
"""Starts that look best after two rounds go on until nothing changes, or for `ROUNDS`."""
ROUNDS: Final = 20
FAR: Final = 4
"""An outlier is more than so many times as far off as the median."""
NEAR_PPM: Final = 1_000
"""No time that is as near as this is an outlier: rounding does that."""
MILLION: Final = 1_000_000

Values = tuple[int, int, int]
"""A cost: nanoseconds, picoseconds for each patch or token, femtoseconds for each pair of them."""


@dataclass(frozen=True, slots=True)
class Row:
    """A microbatch, or the medians of some of about the same size."""

    total: int
    squares: int
    time: int
    """Nanoseconds that the microbatch took."""
    weight: int = 1
    """Factor that a row's distance from a fit is multiplied by."""

    def expected(self, values: Values) -> int:
        """Its time by a cost, in millionths of a nanosecond."""
        return values[0] * MILLION + self.total * values[1] * 1_000 + self.squares * values[2]

    def distance(self, values: Values) -> int:
        """How far its time is from a cost, with its weight."""
        return abs(self.time * MILLION - self.expected(values)) * self.weight


def fitted(rows: Sequence[Row]) -> Values:
    """The cost nearest to the times in the sense of least squares."""
    weights = [row.weight for row in rows]
    columns = (weights, [r.total * r.weight for r in rows], [r.squares * r.weight for r in rows])
    times = [r.time * r.weight for r in rows]
    constant, linear, quadratic = nonnegative_least_squares(gram_matrix(columns), [dot(c, times) for c in columns])
    return round(constant), round(linear * 1_000), round(quadratic * MILLION)


def undisturbed(rows: Sequence[Row]) -> list[bool]:
    """Which times belong to the sizes of their microbatches; all, where there are too few to tell.

    The disturbed ones are told apart, however long or short they took, where

    - more than half of all times are undisturbed, and
    - of at least two thirds of the sizes (`_by_size`) more than half of the times are.

    The disturbed sizes may be any, such as the largest third or the most frequent, but must leave three of the `GRID`
    sizes that searches start from. Those that are undisturbed must determine the cost: `fit` refuses them otherwise.
    """
    if len(rows) < LEAST_ROWS:
        return [True] * len(rows)
    kept = _near(rows, _searched(_by_size(rows)))
    return _near(rows, fitted([row for row, near in zip(rows, kept, strict=True) if near]))


def _near(rows: Sequence[Row], values: Values) -> list[bool]:
    """Which rows are not much further from a cost than their median, in parts of what it expects of them."""
    expected = [row.expected(values) for row in rows]
    floor = median(expected) // 4 + 1  # clocks and calls disturb small microbatches by more than their part
    off = [row.distance(values) * MILLION // (e + floor) for row, e in zip(rows, expected, strict=True)]
    limit = max(NEAR_PPM, FAR * median(off))
    return [value <= limit for value in off]


def _by_size(rows: Sequence[Row]) -> list[Row]:
    """The medians of microbatches of about the same size, small ones first; an even choice of them where they are many.

    Their weights make a distance a part of the time.
    """
    cells: dict[tuple[tuple[int, int], ...], list[Row]] = {}
    for row in rows:
        cells.setdefault((_leading(row.total), _leading(row.squares)), []).append(row)
    found = sorted(
        (median([r.total for r in cell]), median([r.squares for r in cell]), median([r.time for r in cell]))
        for cell in cells.values()
    )
    found = [found[i] for i in _spread(len(found), MOST_SIZES)]
    floor = median([time for _, _, time in found]) // 4 + 1
    largest = max(time for _, _, time in found) + floor
    return [Row(*row, weight=(largest << 20) // (row[2] + floor)) for row in found]


def _leading(number: int) -> tuple[int, int]:
    cut = max(0, number.bit_length() - SIZE_BITS)
    return cut, number >> cut


def _spread(number: int, most: int) -> list[int]:
    """At most so many positions, evenly spread."""
    taken = min(number, most)
    return [(2 * i + 1) * number // (2 * taken) for i in range(taken)]


def median(values: Sequence[int]) -> int:
    """The median; of an even number of values the mean of the two in the middle, rounded down."""
    middle = sorted(values)[(len(values) - 1) // 2 : len(values) // 2 + 1]
    return sum(middle) // len(middle)


@dataclass(frozen=True, slots=True, order=True)
class _Trimmed:
    """A fit and the rows that are nearest to it."""

    off: int
    """Sum of the squares of their distances."""
    values: Values
    nearest: tuple[int, ...]


def _searched(rows: list[Row]) -> Values:
    """The cost whose nearest two thirds of the rows are nearest."""
    everything = tuple(range(len(rows)))
    if len(rows) < LEAST_SIZES:
        return fitted(rows)
    starts = [everything, *combinations(_spread(len(rows), GRID), 3)]
    found = sorted(_concentrated(rows, start, 2) for start in starts)
    return min(_concentrated(rows, trimmed.nearest, ROUNDS) for trimmed in found[:FINALISTS]).values


def _concentrated(rows: list[Row], start: tuple[int, ...], rounds: int) -> _Trimmed:
    """Fit some rows and take the nearest two thirds of all instead, over and over: no round ends further off."""
    trimmed = _Trimmed(0, (0, 0, 0), start)
    for _ in range(rounds):
        values = fitted([rows[i] for i in trimmed.nearest])
        off = [row.distance(values) for row in rows]
        nearest = sorted(range(len(rows)), key=lambda i: off[i])[: len(rows) - len(rows) // 3]
        now = _Trimmed(sum(off[i] ** 2 for i in nearest), values, tuple(sorted(nearest)))
        if now.nearest == trimmed.nearest:
            return now
        trimmed = now
    return trimmed
