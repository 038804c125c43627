"""Kernels that put samples in another order."""

from typing import NamedTuple

import numpy as np

from dataserver.planning import I32, I64, U64
from dataserver.planning.kernels.compiler import kernel
from dataserver.planning.kernels.placed import order_of_places


class Sizes(NamedTuple):
    """The fields of `samples.SampleSizes` as arrays that a kernel takes."""

    text_tokens: I64
    image_offsets: I64
    image_rows: I32
    image_columns: I32


def picked(sizes: Sizes, at: I64) -> Sizes:
    """The sizes of some samples, int64 [k]: where each is in the given ones."""
    offsets = np.empty(len(at) + 1, np.int64)
    count = _count(sizes.image_offsets, at, offsets)
    found = Sizes(np.empty(len(at), np.int64), offsets, np.empty(count, np.int32), np.empty(count, np.int32))
    _pick(sizes, at, found)
    return found


def order_of_draws(words: U64) -> I64:
    """The order of draws by their words, int64 [n]; equal ones come in any order.

    Draws are spread evenly over their range, so they are counted by so many leading bits that there are two to four
    places for each, and few share one: a fifth of the time of numpy's `argsort`, where that has no vector instructions.

    Args:
        words: uint64 [n].
    """
    if not len(words):
        return np.empty(0, np.int64)
    above = words - words.min()
    shift = max(0, int(above.max()).bit_length() - len(words).bit_length() - 1)
    order = order_of_places((above >> np.uint64(shift)).astype(np.int64))
    _settle(words, order)
    return order


@kernel
def _settle(words: U64, order: I64) -> None:
    """Sort an order in which only neighbours are out of place, by insertion."""
    for i in range(1, len(order)):
        item, to = order[i], i
        while to > 0 and words[order[to - 1]] > words[item]:
            order[to] = order[to - 1]
            to -= 1
        order[to] = item


@kernel
def _count(given: I64, at: I64, offsets: I64) -> int:
    """Fill in the first image of each sample. Returns how many images all have."""
    count = 0
    for i in range(len(at)):
        offsets[i] = count
        count += given[at[i] + 1] - given[at[i]]
    offsets[len(at)] = count
    return count


@kernel
def _pick(given: Sizes, at: I64, found: Sizes) -> None:
    """Fill in all but the first images of `found`."""
    to = 0
    for i in range(len(at)):
        found.text_tokens[i] = given.text_tokens[at[i]]
        for image in range(given.image_offsets[at[i]], given.image_offsets[at[i] + 1]):
            found.image_rows[to], found.image_columns[to] = given.image_rows[image], given.image_columns[image]
            to += 1
