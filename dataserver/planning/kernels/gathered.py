"""Compiled loops that put samples in another order."""

from typing import NamedTuple

import numpy as np

from dataserver.planning.kernels import kernel
from dataserver.planning.samples import I32, I64


class Sizes(NamedTuple):
    """The fields of `samples.SampleSizes`."""

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
