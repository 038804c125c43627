"""Scaling of images to their places among the patches."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.kernels import fetch_line, kernel, load_word, part, store_word

BAND: Final = 64
"""New rows that are made at a time: what lies between the two passes then stays in a core's own caches."""
_APART: Final = 14
"""Every so many new pixels of a row their place is fetched, some time before they are written: what a microbatch lies
in has left the caches since the last one. In patches of 14 pixels the lines between two such places are other rows'."""
_ONE: Final = 256
"""Sum of the weights of a new row."""
_BYTE, _PIXEL = np.uint32(0xFF), np.uint32(0xFFFFFF)
_8, _16, _24 = np.uint32(8), np.uint32(16), np.uint32(24)
_LONG_24, _LONG_48 = np.uint64(24), np.uint64(48)


@kernel
def scale_image(
    pixels: NDArray[np.uint8],
    tall: int,
    wide: int,
    down: NDArray[np.int64],
    across: NDArray[np.int64],
    weights: NDArray[np.int64],
    spans: NDArray[np.int64],
    taps: NDArray[np.uint16],
    sums: NDArray[np.uint16],
    rows: NDArray[np.uint8],
    lying: NDArray[np.uint8],
    out: NDArray[np.uint8],
) -> None:
    """Scale an image along its columns and then along its rows, and put each new pixel in its place.

    Pixels are turned between the passes, so that the second one sums up rows, too: their pixels lie side by side. They
    take four bytes each then, which move as one word. So does what is behind the last pixel of a row, and is not used.

    Args:
        pixels: [old rows, 3 * old columns].
        tall: eighths of old rows that the image takes; the last of them may reach beyond it.
        wide: the same of old columns.
        down: [new rows]: first part of the place of a pixel.
        across: [new columns]: second part; the place is their sum.
        weights: room for those of one new row or column, [old ones under a triangle].
        spans: room for the first old column of each new one, and how many it has, [2, new columns].
        taps: room for the weights of new columns and of one new row as shares of 256, [new columns + 1, as many as
            `weights`, at least 2].
        sums: room for one row, [at least 3 * old columns, and 4 * BAND]; at most 255 * 256 + 128.
        rows: room for new rows, [BAND, at least 3 * old columns + 1].
        lying: room for them as columns, and for four new columns behind these, [old columns + 4, 4 * BAND].
        out: [3 * pixels of all patches].
    """
    height, old_width, width = pixels.shape[0], len(lying) - 4, len(across)
    line, column = rows.shape[1], lying.shape[1]
    for x in range(width):
        spans[0, x], spans[1, x] = _weigh(x, old_width, width, wide, weights, taps, x)
    for top in range(0, len(down), BAND):
        num = min(BAND, len(down) - top)
        for y in range(num):
            first, count = _weigh(top + y, height, len(down), tall, weights, taps, width)
            _sum_up(pixels, height, first, count, taps, width, sums, 3 * old_width, rows, y)
            for x in range(0, width, _APART):
                _fetch(out, 3 * (down[top + y] + across[x]))
        for x in range(old_width):
            for y in range(num):
                _put(lying, x * column + 4 * y, _word(rows, y * line + 3 * x))
        x = 0
        while x < width:
            beside = across[x]
            together = 1
            if x + 1 < width and across[x + 1] == beside + 1:
                together = 4 if x + 3 < width and across[x + 3] == beside + 3 else 2
            for k in range(together):
                first, count = spans[0, x + k], spans[1, x + k]
                _sum_up(lying, old_width, first, count, taps, x + k, sums, 4 * num, lying, old_width + k)
            if together == 4:
                for y in range(num):
                    place, at = 3 * (down[top + y] + beside), old_width * column + 4 * y
                    one, two = np.uint64(_word(lying, at) & _PIXEL), np.uint64(_word(lying, at + column) & _PIXEL)
                    three, four = _word(lying, at + 2 * column), _word(lying, at + 3 * column)
                    _put(out, place, one | two << _LONG_24 | np.uint64(three) << _LONG_48)
                    _put(out, place + 8, np.uint32(three >> _16 & _BYTE | four << _8))
            elif together == 2:
                for y in range(num):
                    place, at = 3 * (down[top + y] + beside), old_width * column + 4 * y
                    left, right = _word(lying, at), _word(lying, at + column)
                    _put(out, place, np.uint32(left & _PIXEL | right << _24))
                    _put(out, place + 4, np.uint16(right >> _8))
            else:
                for y in range(num):
                    place, at = 3 * (down[top + y] + beside), 4 * y
                    for k in range(3):
                        out[place + k] = lying[old_width, at + k]
            x += together


@load_word
def _word(array: NDArray[np.uint8], at: int) -> np.uint32:
    """Four bytes of a C-contiguous array as one number, least significant first."""
    word: np.uint32 = array.reshape(-1)[at : at + 4].view("<u4")[0]
    return word


@store_word
def _put(array: NDArray[np.uint8], at: int, number: np.unsignedinteger[Any]) -> None:
    """Write the bytes of a number, least significant first."""
    array.reshape(-1)[at : at + number.nbytes].view(number.dtype)[0] = number


@fetch_line
def _fetch(array: NDArray[np.uint8], at: int) -> None:
    """Have the bytes around this one near by when they are written."""


@part
def _weigh(
    new_row: int,
    old: int,
    new: int,
    extent: int,
    weights: NDArray[np.int64],
    taps: NDArray[np.uint16],
    at: int,
) -> tuple[int, int]:
    """Make the weights of old rows in a new one, `taps[at]`. Returns the first of these rows, and their number.

    In units of 1 / (16 * new rows) old rows all is exact: old row k lies at (2k + 1) * 8 * new rows, new row y at
    (2y + 1) * extent, and its triangle reaches 2 * max(extent, 8 * new rows) to both sides.
    """
    reach = 2 * max(extent, 8 * new)
    centre = (2 * new_row + 1) * extent
    first = max(0, (centre - reach) // (16 * new))
    count = total = 0
    for row in range(first, min(old, (centre + reach) // (16 * new) + 1)):
        weight = reach - abs((2 * row + 1) * 8 * new - centre)
        if weight > 0:
            weights[count] = weight
            count += 1
            total += weight
        elif count == 0:
            first = row + 1
    # Rounded as running sums, so that they sum to one exactly.
    running = before = 0
    for k in range(count):
        running += weights[k]
        rounded = (running * _ONE + total // 2) // total
        taps[at, k] = rounded - before
        before = rounded
    if count == 1:
        taps[at, 1] = 0
    return first, count


@part
def _sum_up(
    pixels: NDArray[np.uint8],
    old: int,
    first: int,
    count: int,
    taps: NDArray[np.uint16],
    at: int,
    sums: NDArray[np.uint16],
    width: int,
    out: NDArray[np.uint8],
    y: int,
) -> None:
    """Make row y of `out`, so many bytes wide, of the `old` rows of pixels, by their weights `taps[at]`.

    Two, three or four old rows, which is what most new rows have, are summed up at once; a single one has a second of
    weight 0 beside it. Weights are read as 16 bits: only of factors that are no wider does the compiler know that it
    may multiply 16 bits at a time.
    """
    if count <= 2:
        a, b, second = taps[at, 0], taps[at, 1], min(first + 1, old - 1)
        for x in range(width):
            out[y, x] = np.uint16(_ONE // 2 + a * pixels[first, x] + b * pixels[second, x]) >> 8
    elif count == 3:
        a, b, c = taps[at, 0], taps[at, 1], taps[at, 2]
        second, third = min(first + 1, old - 1), min(first + 2, old - 1)
        for x in range(width):
            near = a * pixels[first, x] + b * pixels[second, x]
            out[y, x] = np.uint16(_ONE // 2 + near + c * pixels[third, x]) >> 8
    elif count == 4:
        a, b, c, d = taps[at, 0], taps[at, 1], taps[at, 2], taps[at, 3]
        second, third, fourth = min(first + 1, old - 1), min(first + 2, old - 1), min(first + 3, old - 1)
        for x in range(width):
            near = a * pixels[first, x] + b * pixels[second, x]
            far = c * pixels[third, x] + d * pixels[fourth, x]
            out[y, x] = np.uint16(_ONE // 2 + near + far) >> 8
    else:
        for x in range(width):
            sums[x] = _ONE // 2
        for k in range(count):
            tap, row = taps[at, k], first + k
            for x in range(width):
                sums[x] = np.uint16(sums[x] + tap * pixels[row, x])
        for x in range(width):
            out[y, x] = sums[x] >> 8
