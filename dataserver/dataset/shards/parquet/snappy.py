"""SNAPPY blocks as fragments that decompress by themselves.

Its writers in C++ start anew every 65,536 bytes. Nothing in the format says so: the tags of each block are walked, and
only where no copy reaches back over such a bound the fragments are used.
"""

from typing import Final, NamedTuple

from dataserver.varints import CutError, read_varint

FRAGMENT_BYTES: Final = 1 << 16
_BYTES_PER_TAG: Final = 64
"""A block with shorter runs on average is walked no further: that would take longer than to decompress it."""
_FREE_TAGS: Final = 256


class Fragment(NamedTuple):
    """A part of a block."""

    start: int
    """First byte in the block."""
    packed_bytes: int
    plain_bytes: int
    is_stored: bool
    """Whether its bytes lie in the block as they are, from `start` on."""


def fragments(block: bytes) -> list[Fragment] | None:
    """Return the fragments of a block in order; None where it is not proven to have such, or is damaged."""
    try:
        plain_bytes, at = read_varint(block, 0)
        return _walk(block, at, plain_bytes)
    except (CutError, ValueError, IndexError):
        return None


def _walk(block: bytes, at: int, plain_bytes: int) -> list[Fragment] | None:
    found: list[Fragment] = []
    first = at  # of the fragment
    made = num_tags = total = 0
    literal = -1  # where the only run of a fragment lies
    max_tags = plain_bytes // _BYTES_PER_TAG + _FREE_TAGS
    while total + made < plain_bytes:
        num_tags += 1
        if num_tags > max_tags:
            return None
        tag = block[at]
        kind = tag & 3
        if kind == 0:
            length, at = _literal(block, at, tag >> 2)
            literal = at if not made else -1
            at += length
        else:
            length, offset, at = _copy(block, at, tag, kind)
            literal = -1
            if not 0 < offset <= made:
                return None
        made += length
        if made == FRAGMENT_BYTES or total + made == plain_bytes:
            is_stored = literal >= 0
            start = literal if is_stored else first
            found.append(Fragment(start, made if is_stored else at - first, made, is_stored))
            total, made, first, literal = total + made, 0, at, -1
        elif made > FRAGMENT_BYTES:
            return None
    return found if at == len(block) and total == plain_bytes else None


def _literal(block: bytes, at: int, code: int) -> tuple[int, int]:
    """Length of a run of bytes, and where it begins."""
    if code < 60:
        return code + 1, at + 1
    num_bytes = code - 59
    end = at + 1 + num_bytes
    return int.from_bytes(block[at + 1 : end], "little") + 1, end


def _copy(block: bytes, at: int, tag: int, kind: int) -> tuple[int, int, int]:
    """Length and offset of a copy, and where it ends."""
    if kind == 1:
        return 4 + (tag >> 2 & 7), (tag >> 5) << 8 | block[at + 1], at + 2
    end = at + (3 if kind == 2 else 5)
    return 1 + (tag >> 2), int.from_bytes(block[at + 1 : end], "little"), end
