"""What samples consist of, in the numbers of an index. Apart from what reads them: servers need no more of it."""

from typing import Final

TEXT: Final = 0
IMAGE: Final = 1
"""Kinds of a sample's parts."""
Scalar = bool | int | float | str
"""Entry of a sample's JSON, or of a sidecar, that filters can ask for."""
