"""Where the frames of a Zstandard stream end (RFC 8878): the library ends quietly where a file is cut.

Only headers are looked at: a block says how long it is.
"""

from typing import Final

from dataserver.dataset.shards.parquet.zstd import MAGIC, frame_header_bytes, has_checksum

_SKIPPABLE: Final = b"\x2a\x4d\x18"
"""The last three bytes of the magic of a frame that is passed over; the first is 0x50 to 0x5f."""
_RUN: Final = 2
"""In the bits of a block's type: it is one byte, many times."""
_FRAME_HEADER_BYTES: Final = 8
"""What is needed to know how long a frame's header is: no frame is shorter."""


class ZstdFrames:
    """Follows a stream that is given piece by piece.

    What is no frame is not followed any further: the library says what is wrong with it.
    """

    def __init__(self) -> None:
        self._rest = b""
        """The begin of a header that goes on in the next piece."""
        self._to_skip = 0
        """Bytes of the next piece before the next header."""
        self._in_frame = False
        self._has_checksum = False
        self._is_lost = False
        self._seen = False
        self._has_ended = False
        """Whether zeros were met behind a frame."""

    @property
    def is_whole(self) -> bool:
        """Whether at least one frame was seen, and all that was given are whole ones."""
        return self._seen and not (self._rest or self._to_skip or self._in_frame or self._is_lost)

    def feed(self, piece: bytes) -> int:
        """Follow the next piece; return how much of it belongs to the stream.

        That is all of it, unless zeros follow a frame, which fill up the last block of some tapes and disks.
        """
        if self._has_ended:
            return 0
        data = self._rest + piece if self._rest else piece
        before = len(self._rest)
        self._rest = b""
        at, self._to_skip = self._to_skip, 0
        size = len(data)
        while at < size and not self._is_lost:
            if self._in_frame:
                at, is_enough = self._blocks(data, at)
            elif self._seen and not data[at]:
                self._has_ended = True
                return max(at - before, 0)
            else:
                at, is_enough = self._header(data, at)
            if not is_enough:
                self._rest = data[at:]
                return len(piece)
        self._to_skip = max(at - size, 0)
        return len(piece)

    def _blocks(self, data: bytes, at: int) -> tuple[int, bool]:
        """Go from block to block; where the next header is, and whether this piece has all of it."""
        size = len(data) - 2
        while at < size:
            head = data[at] | data[at + 1] << 8 | data[at + 2] << 16
            at += 4 if head & 6 == _RUN else 3 + (head >> 3)
            if head & 1:
                self._in_frame = False
                return at + 4 * self._has_checksum, True
        return at, at >= size + 2

    def _header(self, data: bytes, at: int) -> tuple[int, bool]:
        """Pass the header of a frame; as `_blocks`."""
        if len(data) - at < _FRAME_HEADER_BYTES:
            return at, False
        if data[at + 1 : at + 4] == _SKIPPABLE and data[at] >> 4 == 5:
            return at + 8 + int.from_bytes(data[at + 4 : at + 8], "little"), True
        if data[at : at + 4] != MAGIC:
            self._is_lost = True
            return at, True
        descriptor = data[at + len(MAGIC)]
        self._in_frame, self._has_checksum, self._seen = True, has_checksum(descriptor), True
        return at + frame_header_bytes(descriptor), True
