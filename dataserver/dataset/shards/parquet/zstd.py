"""ZSTD pages whose blocks are stored as they are (RFC 8878): values are read from where they lie.

A block of 128 KiB that would become no shorter by a 64th is stored. JPEGs share their tables, some 600 bytes, so those
of over 50 KB are. Where one block of a page is compressed, the page has to be decompressed.
"""

from typing import Final

from dataserver.dataset.shards.parquet.snappy import Fragment

MAGIC: Final = b"\x28\xb5\x2f\xfd"
_DICTIONARY_BYTES: Final = (0, 1, 2, 4)
_SIZE_BYTES: Final = (0, 2, 4, 8)
_LEAST_BYTES: Final = 4096
"""Average size of a block: smaller ones would make the table of pages longer than it is worth."""
_FREE_BLOCKS: Final = 64


def frame_header_bytes(descriptor: int) -> int:
    """How long the header of a frame is, from its magic on, by the byte behind that."""
    is_single = bool(descriptor & 0x20)
    size_bytes = _SIZE_BYTES[descriptor >> 6] or int(is_single)
    return len(MAGIC) + 1 + (not is_single) + _DICTIONARY_BYTES[descriptor & 3] + size_bytes


def has_checksum(descriptor: int) -> bool:
    """Whether four bytes follow the last block of a frame."""
    return bool(descriptor & 4)


def stored_blocks(data: bytes, plain_bytes: int) -> list[Fragment] | None:
    """Return the blocks of one frame in order; None where any of them is compressed, or it is no such frame.

    Args:
        data: of the page.
        plain_bytes: what it must be decompressed.
    """
    if data[: len(MAGIC)] != MAGIC or len(data) <= len(MAGIC):
        return None
    descriptor = data[len(MAGIC)]
    at, total, is_last = frame_header_bytes(descriptor), 0, False
    found: list[Fragment] = []
    while not is_last:
        head = int.from_bytes(data[at : at + 3], "little")
        is_last, size, at = bool(head & 1), head >> 3, at + 3
        if head & 6 or at + size > len(data) or len(found) > plain_bytes // _LEAST_BYTES + _FREE_BLOCKS:
            return None
        if size:
            found.append(Fragment(at, size, size, True))
        at, total = at + size, total + size
    is_whole = at + 4 * has_checksum(descriptor) == len(data) and total == plain_bytes
    return found if is_whole and found else None
