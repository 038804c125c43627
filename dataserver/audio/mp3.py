"""MP3 without a Xing header, whose length nothing says: its frames are counted, and a header put before them.

libsndfile (mpg123) guesses such a length from the bit rate of the first frame, and then reads no further: of a file of
variable bit rate it read 89,014 of 312,192 samples.
"""

from typing import Final, NamedTuple

_RATES: Final = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
"""Sample rates by version: MPEG 1, 2 and 2.5."""
_KBITS: Final = {
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
"""Bit rates of layer III, by whether the version is MPEG 1."""
_MPEG1: Final = 3
_LAYER3: Final = 1
_SYNC_BYTES: Final = 4
_BIT_RATE_AND_PADDING: Final = 0xF2
"""Bits of the third byte of a header."""
_FRAMES_FLAG: Final = 1


class _Frame(NamedTuple):
    """What the header of a frame says."""

    is_mpeg1: bool
    sample_rate: int
    is_mono: bool
    num_bytes: int

    @property
    def samples(self) -> int:
        """Samples of each channel."""
        return 1152 if self.is_mpeg1 else 576

    @property
    def side_bytes(self) -> int:
        """Bytes of side information, behind which a Xing header stands."""
        if self.is_mpeg1:
            return 17 if self.is_mono else 32
        return 9 if self.is_mono else 17


def is_mp3(data: bytes) -> bool:
    """Whether a file begins as an MP3: a tag, and behind it two frames of one kind, or one that fills it."""
    start = audio_start(data)
    first = _frame(data, start)
    if first is None:
        return False
    end = start + first.num_bytes
    return end >= len(data) or _alike(first, _frame(data, end))


def audio_start(data: bytes) -> int:
    """Where the first frame stands: behind ID3v2 tags. `len(data)` where they say that they take all of it."""
    start = 0
    while data[start : start + 3] == b"ID3" and len(data) >= start + 10:
        size = data[start + 6 : start + 10]
        length = sum((byte & 0x7F) << shift for byte, shift in zip(size, (21, 14, 7, 0), strict=True))
        start += 10 + length + (10 if data[start + 5] & 0x10 else 0)
        if start >= len(data):
            return len(data)
    return start


def with_length(data: bytes) -> bytes:
    """An MP3 that says how many frames it has: the file itself where it does, else its frames behind a Xing header.

    Whatever stands between frames, and tags, are left out; a frame that the end of the file cuts does not count.
    """
    start = audio_start(data)
    first = _frame(data, start)
    if first is None or _says_length(data, start, first):
        return data
    frames, at = list[bytes](), start
    while at + _SYNC_BYTES <= len(data):
        found = _frame(data, at)
        if found is None or not _alike(first, found):
            at = data.find(b"\xff", at + 1)
            if at < 0:
                break
            continue
        if at + found.num_bytes > len(data):
            break
        frames.append(data[at : at + found.num_bytes])
        at += found.num_bytes
    return b"".join([_xing(data[start : start + _SYNC_BYTES], len(frames)), *frames])


def _says_length(data: bytes, start: int, first: _Frame) -> bool:
    """Whether the first frame is a Xing, Info or VBRI header with a number of frames."""
    at = start + _SYNC_BYTES + first.side_bytes
    if data[at : at + 4] in (b"Xing", b"Info"):
        return bool(int.from_bytes(data[at + 4 : at + 8], "big") & _FRAMES_FLAG)
    return data[start + 36 : start + 40] == b"VBRI"


def _xing(header: bytes, num_frames: int) -> bytes:
    """A frame of silence with a Xing header: of the highest bit rate, so that it has room, and without a checksum."""
    header = bytes([header[0], header[1] | 1, (header[2] & ~_BIT_RATE_AND_PADDING & 0xFF) | 0xE0, header[3]])
    frame = _frame(header, 0)
    assert frame is not None
    said = b"Xing" + _FRAMES_FLAG.to_bytes(4, "big") + num_frames.to_bytes(4, "big")
    return (header + bytes(frame.side_bytes) + said).ljust(frame.num_bytes, b"\0")


def _alike(first: _Frame, found: _Frame | None) -> bool:
    """Whether a frame belongs to the same sound."""
    return found is not None and found[:3] == first[:3]


def _frame(data: bytes, at: int) -> _Frame | None:
    """The frame whose header stands at a byte; None where there is none, or its bit rate is free."""
    header = data[at : at + _SYNC_BYTES]
    if len(header) < _SYNC_BYTES or header[0] != 0xFF or header[1] & 0xE0 != 0xE0:
        return None
    version, layer = header[1] >> 3 & 3, header[1] >> 1 & 3
    bit_rate, rate = header[2] >> 4, header[2] >> 2 & 3
    if version not in _RATES or layer != _LAYER3 or bit_rate in (0, 15) or rate == 3:
        return None
    is_mpeg1 = version == _MPEG1
    sample_rate = _RATES[version][rate]
    size = (144_000 if is_mpeg1 else 72_000) * _KBITS[is_mpeg1][bit_rate] // sample_rate + (header[2] >> 1 & 1)
    return _Frame(is_mpeg1, sample_rate, header[3] >> 6 == 3, size)
