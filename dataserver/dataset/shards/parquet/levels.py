"""Levels and dictionary indexes of Parquet pages: runs and bit-packed groups of small numbers."""

from typing import Final

import numpy as np
import numpy.typing as npt

from dataserver.varints import CutError, read_varint

I64 = npt.NDArray[np.int64]

MAX_BIT_WIDTH: Final = 32


def decode_hybrid(data: bytes, width: int, count: int) -> I64:
    """Return `count` numbers of `width` bits each, int64 [count].

    Raises:
        ValueError: `data` holds fewer, or is none of this.
    """
    if not 0 <= width <= MAX_BIT_WIDTH:
        raise ValueError(f"numbers of {width} bits")
    found = np.zeros(count, np.int64)
    done = at = 0
    weights = np.left_shift(1, np.arange(width, dtype=np.int64))
    num_bytes = -(-width // 8)
    while done < count and width:
        try:
            header, at = read_varint(data, at)
        except CutError as error:
            raise ValueError(f"{done} of {count} numbers") from error
        if header & 1:
            length = min((header >> 1) * 8, count - done)
            packed = np.frombuffer(data, np.uint8, min(-(-length * width // 8), len(data) - at), at)
            bits = np.unpackbits(packed, bitorder="little")[: length * width]
            if bits.size < length * width:
                raise ValueError(f"{done} of {count} numbers")
            found[done : done + length] = bits.reshape(length, width) @ weights
            at += (header >> 1) * width
        else:
            length = min(header >> 1, count - done)
            if at + num_bytes > len(data):
                raise ValueError(f"{done} of {count} numbers")
            found[done : done + length] = int.from_bytes(data[at : at + num_bytes], "little")
            at += num_bytes
        if not length:
            raise ValueError("an empty run of numbers")
        done += length
    return found
