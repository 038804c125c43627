"""Scaling of images straight into their patches."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.kernels.compiler import fetch_line, kernel, load_word, part, store_word

BAND: Final = 64
"""New rows that are made at a time: what lies between the two passes then stays in a core's own caches."""
_STRIDE: Final = 14
"""Every so many new pixels of a row their target is fetched, some time before they are written: what a microbatch
lies in has left the caches since the last one. In patches of 14 pixels the lines between two such targets are other
rows'."""
_ONE: Final = 256
"""Sum of the weights of a new row."""
_BYTE, _PIXEL = np.uint32(0xFF), np.uint32(0xFFFFFF)
_8, _16, _24 = np.uint32(8), np.uint32(16), np.uint32(24)
_LONG_24, _LONG_48 = np.uint64(24), np.uint64(48)


@kernel
def scale_image(
    pixels: NDArray[np.uint8],
    old_width: int,
    height: int,
    whole_width: int,
    whole_height: int,
    down: NDArray[np.int64],
    across: NDArray[np.int64],
    buffer: NDArray[np.uint8],
    out: NDArray[np.uint8],
) -> int:
    """Scale an image along its columns and then along its rows, and put each new pixel where its patch wants it.

    Pixels are turned between the passes, so that the second one sums up rows, too: their pixels lie side by side. They
    take four bytes each then, which move as one word. So does what is behind the last pixel of a row, and is not used.

    Args:
        pixels: [3 * pixels of the image at 1/1, 1/2, 1/4 or 1/8 of its size, rounded up].
        old_width, height: of these.
        whole_width, whole_height: the image's size.
        down: [new rows]: first part of the offset of a pixel.
        across: [new columns]: second part; the offset is their sum.
        buffer: for all that lies between the passes, from a multiple of 8 bytes on; its content does not matter.
        out: [3 * pixels of all patches].

    Returns:
        Bytes of `buffer` that it takes; where there are fewer, nothing was done. -1 where the pixels are not the image
        at one of these sizes.
    """
    width = len(across)
    reduced = _reduction(old_width, height, whole_width, whole_height)
    if reduced < 0:
        return -1
    # In eighths of old rows and columns the image takes; the last of them may reach beyond it.
    tall, wide = 8 * whole_height // reduced, 8 * whole_width // reduced
    most = 2 * max(-(-height // len(down)), -(-old_width // width)) + 3  # old ones under a triangle, at least 5
    line = 3 * old_width // 128 * 128 + 192  # odd in lines of caches, so that no two rows share cache sets
    column = 4 * BAND
    a = _aligned(8 * most)
    b = a + _aligned(16 * width)
    c = b + _aligned(2 * (width + 1) * most)
    d = c + _aligned(2 * max(3 * old_width, column))
    e = d + BAND * line
    end = e + (old_width + 4) * column
    if end > len(buffer):
        return end
    # What would be a matrix is a row of rows: numba's way to reshape an array is not compiled with its callers.
    weights = buffer[:a].view(np.int64)  # of one new row or column
    spans = buffer[a:b].view(np.int64)  # the first old column of each new one, and how many it has
    taps = buffer[b:c].view(np.uint16)  # the weights of new columns and of one new row as shares of 256
    sums = buffer[c:d].view(np.uint16)  # of one row; at most 255 * 256 + 128
    rows = buffer[d:e]  # new rows
    lying = buffer[e:end]  # the same as columns, and four new columns behind these
    for x in range(width):
        spans[2 * x], spans[2 * x + 1] = _weigh(x, old_width, width, wide, weights, taps, x * most)
    of_row = width * most
    for top in range(0, len(down), BAND):
        num = min(BAND, len(down) - top)
        for y in range(num):
            first, count = _weigh(top + y, height, len(down), tall, weights, taps, of_row)
            new = rows[y * line : y * line + 3 * old_width]
            _sum_up(pixels, first * 3 * old_width, 3 * old_width, count, taps, of_row, sums, new)
            for x in range(0, width, _STRIDE):
                _fetch(out, 3 * (down[top + y] + across[x]))
        for x in range(old_width):
            for y in range(num):
                _put(lying, x * column + 4 * y, _word(rows, y * line + 3 * x))
        _make_columns(lying, old_width, num, down[top : top + num], across, spans, taps, most, sums, out)
    return end


@part
def _reduction(old_width: int, height: int, whole_width: int, whole_height: int) -> int:
    """By how much an image of some size was reduced: 1, 2, 4 or 8; -1 if by none of these."""
    reduced = 1
    while -(-whole_width // reduced) != old_width or -(-whole_height // reduced) != height:
        if reduced == 8:
            return -1
        reduced *= 2
    return reduced


@part
def _make_columns(
    lying: NDArray[np.uint8],
    old_width: int,
    num: int,
    down: NDArray[np.int64],
    across: NDArray[np.int64],
    spans: NDArray[np.int64],
    taps: NDArray[np.uint16],
    most: int,
    sums: NDArray[np.uint16],
    out: NDArray[np.uint8],
) -> None:
    """Sum up the new columns of `num` rows, as many at once as lie side by side in their patch, and write them."""
    column, width, x = 4 * BAND, len(across), 0
    while x < width:
        beside = across[x]
        together = 1
        if x + 1 < width and across[x + 1] == beside + 1:
            together = 4 if x + 3 < width and across[x + 3] == beside + 3 else 2
        for k in range(together):
            first, count = spans[2 * (x + k)], spans[2 * (x + k) + 1]
            new = lying[(old_width + k) * column : (old_width + k) * column + 4 * num]
            _sum_up(lying, first * column, column, count, taps, (x + k) * most, sums, new)
        _write(lying, old_width * column, together, down, beside, out)
        x += together


@part
def _write(
    lying: NDArray[np.uint8], start: int, together: int, down: NDArray[np.int64], beside: int, out: NDArray[np.uint8]
) -> None:
    """Write one, two or four new columns, which lie from `start` on, side by side."""
    column = 4 * BAND
    if together == 4:
        for y in range(len(down)):
            target, at = 3 * (down[y] + beside), start + 4 * y
            one, two = np.uint64(_word(lying, at) & _PIXEL), np.uint64(_word(lying, at + column) & _PIXEL)
            three, four = _word(lying, at + 2 * column), _word(lying, at + 3 * column)
            _put(out, target, one | two << _LONG_24 | np.uint64(three) << _LONG_48)
            _put(out, target + 8, np.uint32(three >> _16 & _BYTE | four << _8))
    elif together == 2:
        for y in range(len(down)):
            target, at = 3 * (down[y] + beside), start + 4 * y
            left, right = _word(lying, at), _word(lying, at + column)
            _put(out, target, np.uint32(left & _PIXEL | right << _24))
            _put(out, target + 4, np.uint16(right >> _8))
    else:
        for y in range(len(down)):
            target = 3 * (down[y] + beside)
            for k in range(3):
                out[target + k] = lying[start + 4 * y + k]


@part
def _aligned(num_bytes: int) -> int:
    """The next multiple of 64."""
    return (num_bytes + 63) // 64 * 64


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
    new_row: int, old: int, new: int, extent: int, weights: NDArray[np.int64], taps: NDArray[np.uint16], at: int
) -> tuple[int, int]:
    """Make the weights of old rows in a new one. Returns the first of these rows, and their number.

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
        taps[at + k] = rounded - before
        before = rounded
    if count == 1:
        taps[at + 1] = 0
    return first, count


@part
def _sum_up(
    pixels: NDArray[np.uint8],
    start: int,
    line: int,
    count: int,
    taps: NDArray[np.uint16],
    at: int,
    sums: NDArray[np.uint16],
    out: NDArray[np.uint8],
) -> None:
    """Make a new row of the `count` rows of pixels that lie from `start` on, one every `line` bytes.

    Their weights are those from `at` on. Two, three or four of them, which is what most new rows have, are summed up at
    once; a single one is its own second, of weight 0. Weights are read as 16 bits: only of factors that are no wider
    does the compiler know that it may multiply 16 bits at a time.
    """
    width = len(out)
    one, two = pixels[start : start + width], pixels[start + line * min(1, count - 1) :]
    a, b = taps[at], taps[at + 1]
    if count <= 2:
        for x in range(width):
            out[x] = np.uint16(_ONE // 2 + a * one[x] + b * two[x]) >> 8
    elif count == 3:
        c, three = taps[at + 2], pixels[start + 2 * line :]
        for x in range(width):
            near = a * one[x] + b * two[x]
            out[x] = np.uint16(_ONE // 2 + near + c * three[x]) >> 8
    elif count == 4:
        c, d, three, four = taps[at + 2], taps[at + 3], pixels[start + 2 * line :], pixels[start + 3 * line :]
        for x in range(width):
            near = a * one[x] + b * two[x]
            far = c * three[x] + d * four[x]
            out[x] = np.uint16(_ONE // 2 + near + far) >> 8
    else:
        for x in range(width):
            sums[x] = _ONE // 2
        for k in range(count):
            tap, row = taps[at + k], pixels[start + k * line :]
            for x in range(width):
                sums[x] = np.uint16(sums[x] + tap * row[x])
        for x in range(width):
            out[x] = sums[x] >> 8
