"""All ways to split a cluster into groups of power-of-two degrees."""

from functools import lru_cache

import numpy as np

from dataserver.planning import I64

MAX_COMPOSITIONS = 50_000
"""128 devices from degree 1 have 27,338; more than this is no planning in milliseconds."""


@lru_cache(maxsize=16)
def group_compositions(num_devices: int, min_degree: int = 1, max_degree: int | None = None) -> I64:
    """Multisets of powers of two, `min_degree` to `max_degree`, that sum to the cluster (FlexSP, section 3.3).

    64 devices have 1,828 from degree 1 and 202 from degree 2.

    Args:
        num_devices: the sum.
        min_degree: smallest part, a power of two.
        max_degree: largest part, a power of two; no limit unless given.

    Returns:
        int64 [compositions, degrees], read-only: how many groups of each degree, ascending degrees; in lexicographic
        order from the largest degree, most groups first.

    Raises:
        ValueError: as of `check_compositions`.
    """
    cells, columns = check_compositions(num_devices, min_degree, max_degree)
    rows = np.array(_rows(cells, columns - 1), np.int64)
    rows.flags.writeable = False
    return rows


def check_compositions(num_devices: int, min_degree: int = 1, max_degree: int | None = None) -> tuple[int, int]:
    """The cluster in cells of `min_degree`, and the number of degrees, of compositions that can be searched.

    Raises:
        ValueError: no composition exists, or there are more than MAX_COMPOSITIONS.
    """
    for name, degree in (("min_degree", min_degree), ("max_degree", max_degree)):
        if degree is not None and (degree < 1 or degree & (degree - 1)):
            raise ValueError(f"{name} {degree} must be a power of two")
    largest = min(max_degree or num_devices, 1 << (max(num_devices, 1).bit_length() - 1))
    if num_devices < 1 or num_devices % min_degree or largest < min_degree:
        raise ValueError(f"groups of {min_degree} to {max_degree} devices cannot make up a cluster of {num_devices}")
    columns = largest.bit_length() - min_degree.bit_length() + 1
    cells = num_devices // min_degree
    number = _count(cells, columns)
    if number > MAX_COMPOSITIONS:
        raise ValueError(
            f"{num_devices} devices have {number} compositions of groups of {min_degree} to {largest}, and at most "
            f"{MAX_COMPOSITIONS} are searched: use min_degree {2 * min_degree} or more"
        )
    return cells, columns


def _count(cells: int, columns: int) -> int:
    """Number of compositions of `cells` into parts 1, 2, 4, ... of `columns` sizes."""
    ways = [1] * (cells + 1)
    for column in range(1, columns):
        part = 1 << column
        for total in range(part, cells + 1):
            ways[total] += ways[total - part]
    return ways[cells]


def _rows(cells: int, column: int) -> list[list[int]]:
    """Compositions of `cells` into parts up to `1 << column`, most of the largest first."""
    if column == 0:
        return [[cells]]
    most = cells >> column
    return [[*row, count] for count in range(most, -1, -1) for row in _rows(cells - (count << column), column - 1)]
