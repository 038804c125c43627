"""What becomes of an image whose data end too early, where that is accepted."""

from typing import NamedTuple

Size = tuple[int, int]
"""Width and height, in pixels."""


class Completed(NamedTuple):
    """A file that goes on to its end."""

    data: bytes
    missing: tuple[tuple[slice, slice], ...]
    """Rows and columns of the pixels that it lacks and that the decoder does not leave grey."""
