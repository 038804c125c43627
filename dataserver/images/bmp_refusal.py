"""What a BMP says of itself, before Pillow decodes it: its runs are put together in Python."""

from typing import Final

_RUNS: Final = (1, 2)
"""Values of the header's compression that are run-length encoded: RLE8 and RLE4."""
MAX_RUN_BYTES: Final = 4 << 20
"""Largest file whose pixels are runs."""
MAX_RUN_SIDE: Final = 1 << 14
"""Pixels of its sides: a run may skip 255 rows."""


def refusal(data: bytes) -> str:
    """Say why a file is not given to Pillow; nothing where it is."""
    if int.from_bytes(data[14:18], "little") < 40 or int.from_bytes(data[30:34], "little") not in _RUNS:
        return ""
    width, height = (int.from_bytes(data[i : i + 4], "little", signed=True) for i in (18, 22))
    if len(data) > MAX_RUN_BYTES or max(width, abs(height)) > MAX_RUN_SIDE:
        return (
            f"runs (RLE) of {len(data)} bytes for {width} x {abs(height)} pixels; limits are {MAX_RUN_BYTES} bytes and"
            f" sides of {MAX_RUN_SIDE}"
        )
    return ""
