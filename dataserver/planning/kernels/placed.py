"""Kernels over items that have places."""

from typing import NamedTuple

import numpy as np

from dataserver.planning import I32, I64, Bool
from dataserver.planning.kernels.compiler import kernel


def order_of_places(place: I64) -> I64:
    """The stable order of items by place, int64 [k]: counted, so that it takes a fifth of the time of a sort.

    Args:
        place: int64 [k], small non-negative numbers: there is memory for as many.
    """
    order = np.empty_like(place)
    _order(place, np.zeros(int(place.max(initial=-1)) + 2, np.int64), order)
    return order


class Placed(NamedTuple):
    """k items, sorted by rank and microbatch. int64 [k] each."""

    rank: I64
    microbatch: I64
    position: I64
    """Items before it in its microbatch."""
    start: I64
    """Rows of the items before it in its microbatch."""


def in_places(order: I64, rank: I64, microbatch: I64, rows: I64) -> Placed:
    """Items in an order by rank and microbatch, with their places there.

    Args:
        order: int64 [k], the item that comes first, and so on.
        rank: int64 [k], of each item; so are the others.
        microbatch: its own.
        rows: that it takes.
    """
    found = Placed(*(np.empty_like(order) for _ in Placed._fields))
    _in_places(order, rank, microbatch, rows, found)
    return found


class Beside(NamedTuple):
    """The n samples of a backbone's arrangement, and what is known of the samples and images of the step."""

    item: I64
    rank: I64
    microbatch: I64
    """int64 [n] each, sorted by rank and microbatch."""
    first: I64
    end: I64
    """int64 [n] each: the images of each sample of the step that have rows in the backbone."""
    mine: Bool
    """bool [n]: samples whose images are found."""
    image_rows: I32
    image_columns: I32
    """int32 [m] each: size of each image in patches."""


def images_of(beside: Beside, merged: int, given: int) -> tuple[I64, ...]:
    """The images of some samples in the backbone's order; see `arranging.images_beside`.

    Args:
        beside: the backbone and the step.
        merged: patches that make up a row of an image.
        given: rows of every image; negative where they follow from its patches.

    Returns:
        int64 [k] each, in the order of `arranging.BesideBackbone`.
    """
    number = np.empty(len(beside.mine), np.int64)
    count = _numbered(beside.first, beside.end, beside.mine, number)
    found = np.empty((6, count), np.int64)
    with_images = np.flatnonzero((beside.end > beside.first)[beside.item])
    _images_of(beside, with_images, number, merged, given, found)
    return tuple(found)


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
def _in_places(order: I64, rank: I64, microbatch: I64, rows: I64, found: Placed) -> None:
    """Fill in `found` for sequences in the order of their microbatches and ranks."""
    position = start = 0
    for i in range(len(order)):
        item = order[i]
        found.rank[i], found.microbatch[i] = rank[item], microbatch[item]
        if i > 0 and (found.rank[i] != found.rank[i - 1] or found.microbatch[i] != found.microbatch[i - 1]):
            position = start = 0
        found.position[i], found.start[i] = position, start
        position += 1
        start += rows[item]


@kernel
def _numbered(first: I64, end: I64, mine: Bool, number: I64) -> int:
    """Fill in how many images of the samples that are `mine` stand before each sample. Returns how many there are."""
    count = 0
    for sample in range(len(mine)):
        number[sample] = count
        count += mine[sample] * (end[sample] - first[sample])  # a branch would be taken at random
    return count


@kernel
def _images_of(beside: Beside, with_images: I64, number: I64, merged: int, given: int, found: I64) -> None:
    """Fill in `found`, int64 [6, k]."""
    item, rank, microbatch = beside.item, beside.rank, beside.microbatch
    count = so_far = before = 0
    for i in with_images:
        if rank[i] != rank[before] or microbatch[i] != microbatch[before]:
            so_far = 0
        before, sample = i, item[i]
        for image in range(beside.first[sample], beside.end[sample]):
            rows = given
            if given < 0:
                rows = beside.image_rows[image] * beside.image_columns[image] // merged
            if beside.mine[sample]:
                found[0, count], found[1, count] = image, number[sample] + image - beside.first[sample]
                found[2, count], found[3, count] = rank[i], microbatch[i]
                found[4, count], found[5, count] = so_far, rows
                count += 1
            so_far += rows
