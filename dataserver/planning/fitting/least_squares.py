"""Least squares in exact integers and fractions: columns need no scaling, and a test for zero needs no tolerance."""

from collections.abc import Sequence
from fractions import Fraction
from operator import mul


def dot(a: Sequence[int], b: Sequence[int]) -> int:
    """Scalar product of two vectors."""
    return sum(map(mul, a, b))


def gram_matrix(columns: Sequence[Sequence[int]]) -> list[list[int]]:
    """A'A of the columns of A."""
    return [[dot(a, b) for b in columns] for a in columns]


def nonnegative_least_squares(gram: Sequence[Sequence[int]], moments: Sequence[Fraction | int]) -> list[Fraction]:
    """Minimise |A x - y| over x >= 0, given A'A and A'y (Lawson and Hanson 1974, section 23.3), exactly.

    In exact arithmetic a column that depends on the active ones has no gradient, so that none ever enters.
    """
    size = len(moments)
    x, active = [Fraction(0)] * size, list[int]()
    while True:
        gradient = [moments[j] - sum(map(mul, gram[j], x)) for j in range(size)]
        rising = [j for j in range(size) if j not in active and gradient[j] > 0]
        if not rising:
            return x
        active.append(max(rising, key=lambda j: gradient[j] ** 2 * Fraction(1, gram[j][j])))
        while min(z := _solved(gram, moments, active)) <= 0:
            shrinking = [(j, goal) for j, goal in zip(active, z, strict=True) if goal <= 0]
            step = min(Fraction(x[j], x[j] - goal) for j, goal in shrinking)
            for j, goal in zip(active, z, strict=True):
                x[j] += step * (goal - x[j])
            active = [j for j in active if x[j] > 0]
        for j, goal in zip(active, z, strict=True):
            x[j] = goal


def _solved(gram: Sequence[Sequence[int]], moments: Sequence[Fraction | int], active: list[int]) -> list[Fraction]:
    """Solution of the normal equations of the active columns, which are independent."""
    rows = [[*(Fraction(gram[i][j]) for j in active), Fraction(moments[i])] for i in active]
    for i, row in enumerate(rows):
        inverse = Fraction(row[i].denominator, row[i].numerator)
        rows[i] = [value * inverse for value in row]
        for k, other in enumerate(rows):
            if k != i:
                rows[k] = [b - other[i] * a for a, b in zip(rows[i], other, strict=True)]
    return [row[-1] for row in rows]
