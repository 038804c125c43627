"""What a JPEG says of itself before it is decoded."""

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.kernels.compiler import kernel, part

_RESTART, _END, _START_OF_SCAN, _TEMPORARY, _FRAME, _LAST_FRAME = 0xD0, 0xD9, 0xDA, 0x01, 0xC0, 0xC2
"""Second bytes of markers, behind 0xff. Between the first and the third are those of restarts, begin and end."""
_LAST_APPLICATION, _COMMENT = 0xEF, 0xFE
"""From `_FRAME` to the first, and the second, all others have a length behind them, or libjpeg refuses the file."""


@part
def _count_scans(data: NDArray[np.uint8]) -> int:
    """Count the scans of a JPEG that libjpeg decodes: those outside of other segments, up to the end of the image.

    As libjpeg does, it looks for the next marker behind each segment, and in entropy-coded data, where what is no
    marker is followed by a zero. Where a segment does not end within the file, all that may be scans from there count.
    """
    scans, at, end = 0, 2, len(data)
    while at + 1 < end:
        marker = data[at + 1]
        if data[at] != 0xFF or marker == 0xFF:  # which may be filled up with more of these
            at += 1
            continue
        at += 2
        if marker == _END:
            break
        scans += marker == _START_OF_SCAN
        if not (_START_OF_SCAN <= marker <= _LAST_APPLICATION or _FRAME <= marker < _RESTART or marker == _COMMENT):
            continue
        length = int(data[at]) * 256 + int(data[at + 1]) if at + 1 < end else 0
        if length < 2 or at + length > end:
            for i in range(at, end - 1):
                scans += (data[i] == 0xFF) & (data[i + 1] == _START_OF_SCAN)
            break
        at += length
    return scans


@kernel
def look_at_jpeg(data: NDArray[np.uint8], most: int) -> tuple[int, int, int, int]:
    """Count a JPEG's scans, and find its frame if there are only segments before it.

    Args:
        data: the encoded image, read-only.
        most: scans that it may have.

    Returns:
        Scans that libjpeg decodes. Up to `most` it may be more: what looks like one in thumbnails, other segments and
        behind the image counts too, which takes a tenth of the time. Width, height and number of components of a
        baseline, extended or progressive frame; zeros where none was found.
    """
    scans = 0
    for i in range(len(data) - 1):
        scans += (data[i] == 0xFF) & (data[i + 1] == _START_OF_SCAN)
    if scans > most:
        scans = _count_scans(data)
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
