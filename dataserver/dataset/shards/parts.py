"""What samples consist of, in the numbers of an index. Apart from what reads them: servers need no more of it."""

from typing import Final, NamedTuple

TEXT: Final = 0
IMAGE: Final = 1
"""The kinds of a sample's parts."""
Scalar = bool | int | float | str
"""Entry of a sample's JSON, or of a sidecar, that filters can ask for."""


class ImagePart(NamedTuple):
    """One image in a shard: position in bytes, upright size in pixels, EXIF orientation, index into `FORMAT_NAMES`.

    Its fields are those of `columns.IMAGE_TYPE`, in that order.
    """

    offset: int
    length: int
    width: int
    height: int
    orientation: int
    format: int
