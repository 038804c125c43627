"""What a TIFF says of its first image (TIFF 6.0), before anything of it is read by Pillow.

Pillow makes an object of each strip of an uncompressed file, and libtiff a buffer of a whole tile.
"""

import struct
from typing import Final

from dataserver.images.limits import MAX_IMAGE_PIXELS

_SIZES: Final = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
"""Bytes of a value, by type."""
_MAX_ENTRIES: Final = 512
_MAX_PARTS: Final = 1 << 16
"""Most strips or tiles of a file that is decoded."""
_PARTS: Final = (273, 279, 324, 325)
_NUMBERS: Final = {3: "H", 4: "I", 16: "Q"}
_WIDTH, _HEIGHT, _TILE_WIDTH, _TILE_HEIGHT = 256, 257, 322, 323
_BITS, _COLORS = 258, 262
_SIZE_TAGS: Final = (_WIDTH, _HEIGHT, _TILE_WIDTH, _TILE_HEIGHT)
_WHITE_IS_ZERO: Final = 0


def refusal(data: bytes) -> str:
    """Say why a file is not given to Pillow; nothing where it is."""
    try:
        counts, numbers = _entries(data)
    except struct.error:
        return "its first directory is cut"
    except ValueError as error:
        return str(error)
    bits = numbers.get(_BITS, 8)
    if counts.get(_BITS, 1) == 1 and 8 < bits < 16:
        return f"{bits} bits a pixel; convert it to 8 or 16"
    if bits > 8 and numbers.get(_COLORS) == _WHITE_IS_ZERO:
        return f"{bits} bits a pixel where 0 is white; convert it to 0 as black"
    for tag in _PARTS:
        if counts.get(tag, 0) > _MAX_PARTS:
            return f"{counts[tag]} strips or tiles, limit {_MAX_PARTS}"
    if numbers.get(_TILE_WIDTH, 0) * numbers.get(_TILE_HEIGHT, 0) > MAX_IMAGE_PIXELS:
        tile = f"{numbers[_TILE_WIDTH]} x {numbers[_TILE_HEIGHT]}"
        return f"tiles of {tile} pixels, limit {MAX_IMAGE_PIXELS}"
    if not numbers.get(_WIDTH) or not numbers.get(_HEIGHT):
        return "its size is missing"
    return ""


def _entries(data: bytes) -> tuple[dict[int, int], dict[int, int]]:
    """How many values each tag of the first directory has, and single numbers. Raises ValueError or struct.error."""
    order = "<" if data[:2] == b"II" else ">"
    is_big = data[2:4] in (b"+\0", b"\0+")
    (start,) = struct.unpack_from(f"{order}{'Q' if is_big else 'I'}", data, 8 if is_big else 4)
    (num_entries,) = struct.unpack_from(f"{order}{'Q' if is_big else 'H'}", data, start)
    if num_entries > _MAX_ENTRIES:
        raise ValueError(f"{num_entries} tags, limit {_MAX_ENTRIES}")
    at, length = start + (8 if is_big else 2), 20 if is_big else 12
    counts: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for entry in range(at, at + num_entries * length, length):
        tag, kind, count = struct.unpack_from(f"{order}HH{'Q' if is_big else 'I'}", data, entry)
        if count * _SIZES.get(kind, 1) > len(data):
            raise ValueError(f"tag {tag} has {count} values, which the file does not hold")
        counts[tag] = max(count, counts.get(tag, 0))
        if tag in _SIZE_TAGS and (count != 1 or kind not in _NUMBERS):  # libtiff takes other types too
            raise ValueError(f"tag {tag} is no single whole number of type SHORT, LONG or LONG8")
        if count == 1 and kind in _NUMBERS:
            (number,) = struct.unpack_from(f"{order}{_NUMBERS[kind]}", data, entry + (12 if is_big else 8))
            numbers[tag] = max(number, numbers.get(tag, 0))
    return counts, numbers
