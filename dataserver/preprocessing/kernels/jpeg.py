"""What a JPEG says of itself before it is decoded."""

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.kernels import kernel

_RESTART, _START_OF_SCAN, _TEMPORARY, _FRAME, _LAST_FRAME = 0xD0, 0xDA, 0x01, 0xC0, 0xC2
"""Second bytes of markers, behind 0xff. Between the first two are those of restarts, begin and end."""


@kernel
def look_at_jpeg(data: NDArray[np.uint8]) -> tuple[int, int, int, int]:
    """Count a JPEG's scans, and find its frame if there are only segments before it.

    Args:
        data: the encoded image, read-only.

    Returns:
        Markers of scans, which occur nowhere else in entropy-coded data; embedded thumbnails add one or two. Width,
        height and number of components of a baseline, extended or progressive frame; zeros where none was found.
    """
    scans = 0
    for i in range(len(data) - 1):
        scans += (data[i] == 0xFF) & (data[i + 1] == _START_OF_SCAN)
    at = 2
    while at + 9 < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if _FRAME <= marker <= _LAST_FRAME:
            height = int(data[at + 5]) * 256 + int(data[at + 6])
            width = int(data[at + 7]) * 256 + int(data[at + 8])
            return scans, width, height, int(data[at + 9])
        if _RESTART <= marker <= _START_OF_SCAN or marker == _TEMPORARY or marker == 0xFF:  # of no length, or no marker
            break
        at += 2 + int(data[at + 2]) * 256 + int(data[at + 3])
    return scans, 0, 0, 0
