"""Pixels scaled to the patch grid, by one filter: a mean under a triangle that is two new pixels wide.

It is the antialiased bilinear filter of Pillow and torch, in integers of 8 and 16 bits, so that processors sum up many
pixels at a time, and all of them to the same bytes. Weights are shares of 256, and both passes round: photographs come
within 55 dB of Pillow's (`scripts/bench_preprocessing.py --dataset`); stripes of a pixel that shrink a lot do not.
"""

import numpy as np

from dataserver.preprocessing.codecs.patches import U8, Places
from dataserver.preprocessing.codecs.scratch import scratch


def write_scaled(pixels: U8, size: tuple[int, int], places: Places, out: U8) -> None:
    """Scale an image to its grid, with each pixel in its place.

    All is one piece of compiled code, in which other threads have the interpreter: to come back to it takes long where
    all of its memory has left the processor's caches, or where another thread is in it.

    Args:
        pixels: uint8 [height, width, 3], C-contiguous: the image at 1/1, 1/2, 1/4 or 1/8 of its size, rounded up.
        size: (width, height) of the image.
        places: of the new pixels.
        out: uint8 [..., 3 * any], C-contiguous: as many pixels as there are places, overwritten.
    """
    from dataserver.preprocessing.kernels.scaling import BAND, scale_image

    (height, width, _), (down, across) = pixels.shape, places
    reduced = next(s for s in (1, 2, 4, 8) if (-(-size[0] // s), -(-size[1] // s)) == (width, height))
    most = 2 * max(-(-height // len(down)), -(-width // len(across))) + 3
    scale_image(
        pixels.reshape(height, -1),
        8 * size[1] // reduced,
        8 * size[0] // reduced,
        down,
        across,
        np.empty(most, np.int64),
        np.empty((2, len(across)), np.int64),
        np.empty((len(across) + 1, most), np.uint16),
        np.empty(max(3 * width, 4 * BAND), np.uint16),
        scratch("rows", (BAND, 3 * width // 128 * 128 + 192)),  # odd in lines of caches, so that no rows share places
        scratch("lying", (width + 4, 4 * BAND)),
        out.reshape(-1),
    )
