"""Compiled loops over items that have places."""

from typing import NamedTuple

import numpy as np

from dataserver.planning.kernels import kernel
from dataserver.planning.samples import I32, I64, Bool


def order_of_places(place: I64) -> I64:
    """The stable order of items by place, int64 [k]: counted, so that it takes a fifth of the time of a sort.

    Args:
        place: int64 [k], small non-negative numbers: there is memory for as many.
    """
    order = np.empty_like(place)
    _order(place, np.zeros(int(place.max(initial=-1)) + 2, np.int64), order)
    return order


def rows_before(rank: I64, microbatch: I64, rows: I64) -> I64:
    """Sum of the rows before each item among those of its rank's microbatch, which stand together. int64 [k]."""
    before = np.empty_like(rows)
    _rows_before(rank, microbatch, rows, before)
    return before


class Beside(NamedTuple):
    """The n samples of a backbone's arrangement, and what is known of the samples and images of the step."""

    item: I64
    rank: I64
    microbatch: I64
    """int64 [n] each, sorted by rank and microbatch."""
    offsets: I64
    """int64 [n + 1]: first image of each sample of the step."""
    of_kind: Bool
    mine: Bool
    """bool [n]: samples whose images have rows in the backbone, and those of them whose images are found."""
    image_rows: I32
    image_columns: I32
    """int32 [m]."""


def images_of(beside: Beside, merged: int, given: int) -> tuple[I64, I64, I64, I64, I64]:
    """The images of some samples in the backbone's order; see `arranging.images_beside`.

    Args:
        beside: the backbone and the step.
        merged: patches that make up a row of an image.
        given: rows of every image; negative where they follow from its patches.

    Returns:
        int64 [k] each: image, rank, microbatch, first row in the backbone's microbatch, and rows.
    """
    counts = np.diff(beside.offsets)
    found = np.empty((5, int(counts[beside.mine].sum())), np.int64)
    _images_of(beside, merged, given, found)
    image, rank, microbatch, start, rows = found
    return image, rank, microbatch, start, rows


@kernel
def _order(place: I64, following: I64, order: I64) -> None:
    """`following`: zeros, one for each place and one more."""
    for i in range(len(place)):
        following[place[i] + 1] += 1
    for p in range(len(following) - 1):
        following[p + 1] += following[p]
    for i in range(len(place)):
        order[following[place[i]]] = i
        following[place[i]] += 1


@kernel
def _rows_before(rank: I64, microbatch: I64, rows: I64, before: I64) -> None:
    so_far = 0
    for i in range(len(rows)):
        if i > 0 and (rank[i] != rank[i - 1] or microbatch[i] != microbatch[i - 1]):
            so_far = 0
        before[i] = so_far
        so_far += rows[i]


@kernel
def _images_of(beside: Beside, merged: int, given: int, found: I64) -> None:
    """Fill in `found`."""
    item, rank, microbatch = beside.item, beside.rank, beside.microbatch
    count = so_far = 0
    for i in range(len(item)):
        if i > 0 and (rank[i] != rank[i - 1] or microbatch[i] != microbatch[i - 1]):
            so_far = 0
        sample = item[i]
        if not beside.of_kind[sample]:
            continue
        for image in range(beside.offsets[sample], beside.offsets[sample + 1]):
            rows = given
            if given < 0:
                rows = beside.image_rows[image] * beside.image_columns[image] // merged
            if beside.mine[sample]:
                found[0, count], found[1, count], found[2, count] = image, rank[i], microbatch[i]
                found[3, count], found[4, count] = so_far, rows
                count += 1
            so_far += rows
