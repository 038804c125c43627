"""Pixels scaled to the patch grid, by one filter: a mean under a triangle that is two new pixels wide.

It is the antialiased bilinear filter of Pillow and torch, in integers of 8 and 16 bits, so that processors sum up many
pixels at a time, and all of them to the same bytes. Weights are shares of 256, and both passes round: photographs come
within 55 dB of Pillow's (`scripts/bench_preprocessing.py --dataset`); stripes of a pixel that shrink a lot do not.
"""

from dataserver.images.kernels.scaling import scale_image
from dataserver.images.patches import U8, PixelOffsets
from dataserver.images.scratch import scratch


def write_scaled(pixels: U8, size: tuple[int, int], offsets: PixelOffsets, out: U8) -> None:
    """Scale an image to its grid, with each pixel where its patch wants it.

    All is one piece of compiled code, in which other threads have the interpreter: to come back to it takes long where
    all of its memory has left the processor's caches, or where another thread is in it.

    Args:
        pixels: uint8 [height, width, 3], C-contiguous: the image at 1/1, 1/2, 1/4 or 1/8 of its size, rounded up.
        size: (width, height) of the image.
        offsets: where the new pixels lie.
        out: uint8 [..., 3 * any], C-contiguous: as many pixels as there are offsets, overwritten.

    Raises:
        ValueError: the pixels are not the image at one of these sizes.
    """
    (height, width, _), (down, across), buffer = pixels.shape, offsets, scratch("scaling")
    old, new = pixels.reshape(-1), out.reshape(-1)
    while (takes := scale_image(old, width, height, *size, down, across, buffer, new)) > len(buffer):
        buffer = scratch("scaling", takes)
    if takes < 0:
        raise ValueError(f"found pixels of ({width}, {height}) that are no scale of an image of {size}")
