"""MP3 without a Xing header, whose length nothing says: its frames are counted, and a header put before them.

Counting holds Python's lock: it ends with the frames that are wanted, and gives up files that hold much else.

libsndfile (mpg123) guesses such a length from the bit rate of the first frame, and then reads no further: of a file of
variable bit rate it read 89,014 of 312,192 samples.
"""

import functools
import re
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from dataserver.audio.limits import MAX_AUDIO_SECONDS

MAX_BYTES_BETWEEN: Final = 1 << 20
"""Most bytes of a file, in all, that are skipped in search of the next frame; tags do not count. Hostile files are long
searches otherwise."""

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
_MONO: Final = 3
_VBRI_AT: Final = 36
"""Byte of a frame at which Fraunhofer's encoder puts its header, whatever the version."""
_MARGIN_FRAMES: Final = 4
"""Frames beyond the wanted samples: a decoder looks ahead."""
_MOST_BEHIND_TAG: Final = 64 << 10
_MOST_TAGS: Final = 16
"""Tags one after the other."""
_ID3_BYTES: Final = 10
"""Size of the header of an ID3v2 tag, and of its footer."""
_TAG_COST: Final = 256
"""Bytes that tags between frames count as, whatever their length: many empty ones are a long search as well."""
_TOO_MUCH: Final = f"more than {MAX_BYTES_BETWEEN} bytes between its frames are none"
_ANY_FRAME: Final = re.compile(rb"\xff[\xe0-\xff]")
_APE: Final = b"APETAGEX"
_APE_BYTES: Final = 32
"""Size of the header of such a tag, which stands at the end of a file and may hold a picture."""


class _Frame(NamedTuple):
    """What the header of a frame says."""

    is_mpeg1: bool
    sample_rate: int
    is_mono: bool
    num_bytes: int

    @property
    def samples(self) -> int:
        """Number of samples of each channel."""
        return 1152 if self.is_mpeg1 else 576

    @property
    def side_bytes(self) -> int:
        """Bytes of side information, behind which a Xing header stands."""
        if self.is_mpeg1:
            return 17 if self.is_mono else 32
        return 9 if self.is_mono else 17


def is_mp3(data: bytes) -> bool:
    """Whether a file begins as an MP3: a tag, and behind it two frames of one kind, or one that fills it."""
    return _begins_at(data, _first_frame(data))


def with_length(data: bytes, samples: int | None = None) -> tuple[bytes, bool]:
    """Return an MP3 that says how many frames it has, and whether these were counted.

    A file that says so is returned as it is, of any other its frames behind a Xing header, up to that many samples.
    Whatever stands between frames, and tags, are left out; a frame that the end of the file cuts does not count.

    Args:
        data: the file.
        samples: of each channel that are wanted; at least as many are there, where the file has them. By default all,
            of a file that is too long some more than the limit.

    Raises:
        ValueError: too many bytes between frames are none.
    """
    start = _first_frame(data)
    first = _frame(data, start)
    if first is None or _says_length(data, start, first):
        return (data[start:] if start > _after_tags(data, 0) else data), False
    header = data[start : start + _SYNC_BYTES]
    if data[start + _VBRI_AT : start + _VBRI_AT + 4] == b"VBRI":
        start += first.num_bytes
    wanted = (MAX_AUDIO_SECONDS + 1) * first.sample_rate if samples is None else samples
    most = -(-wanted // first.samples) + _MARGIN_FRAMES
    frames = [data[at:end] for at, end in islice(_frames(data, start, header), most)]
    return b"".join([_xing(header, len(frames)), *frames]), True


def _frames(data: bytes, start: int, header: bytes) -> Iterator[tuple[int, int]]:
    """Yield where each frame of the same sound begins and ends, from a byte on."""
    first, at, left = _frame(header, 0), start, MAX_BYTES_BETWEEN
    assert first is not None
    while at + _SYNC_BYTES <= len(data):
        found = _frame(data, at)
        if found is not None and found[:3] == first[:3]:
            if at + found.num_bytes > len(data):
                return
            yield at, at + found.num_bytes
            at += found.num_bytes
        elif (behind := _behind_tags(data, at)) > at:
            at, left = behind, left - _TAG_COST
            if left < 0:
                raise ValueError(_TOO_MUCH)
        else:
            match = _alike_pattern(header).search(data, at + 1, at + left + _SYNC_BYTES)
            if match is None:
                if len(data) - at > left:
                    raise ValueError(_TOO_MUCH)
                return
            left -= match.start() - at
            at = match.start()


def _first_frame(data: bytes) -> int:
    """Where the first frame stands: behind ID3v2 tags, and up to 64 KiB that some writers leave behind these.

    `len(data)` where tags say that they take all of it.
    """
    start = _after_tags(data, 0)
    if start == 0 or _begins_at(data, start):
        return start
    found = (match.start() for match in _ANY_FRAME.finditer(data, start, start + _MOST_BEHIND_TAG))
    return next((at for at in found if _begins_at(data, at)), start)


def _begins_at(data: bytes, start: int) -> bool:
    """Whether two frames of one kind stand at a byte, or one that fills the file."""
    first = _frame(data, start)
    if first is None:
        return False
    end = start + first.num_bytes
    following = _frame(data, end)
    return end >= len(data) or (following is not None and following[:3] == first[:3])


def _after_tags(data: bytes, start: int) -> int:
    """Where ID3v2 tags that stand at a byte end, `start` where there is none; at most `len(data)`."""
    for _ in range(_MOST_TAGS):
        if data[start : start + 3] != b"ID3" or len(data) < start + _ID3_BYTES:
            break
        size = data[start + 6 : start + 10]
        length = sum((byte & 0x7F) << shift for byte, shift in zip(size, (21, 14, 7, 0), strict=True))
        start += _ID3_BYTES + length + (_ID3_BYTES if data[start + 5] & 0x10 else 0)
        if start >= len(data):
            return len(data)
    return start


def _behind_tags(data: bytes, at: int) -> int:
    """Where ID3v2 tags or an APE tag that stand at a byte end; `at` where there is none."""
    if data.startswith(_APE, at):
        return at + _APE_BYTES + int.from_bytes(data[at + 12 : at + 16], "little")
    return _after_tags(data, at)


def _says_length(data: bytes, start: int, first: _Frame) -> bool:
    """Whether the first frame is a Xing or Info header with a number of frames.

    libsndfile ignores that of a VBRI header, and would cut such a file.
    """
    at = start + _SYNC_BYTES + first.side_bytes
    if data[at : at + 4] not in (b"Xing", b"Info"):
        return False
    return bool(int.from_bytes(data[at + 4 : at + 8], "big") & _FRAMES_FLAG)


@functools.lru_cache(64)
def _alike_pattern(header: bytes) -> re.Pattern[bytes]:
    """Finds the headers of frames of the same sound: one version, layer, rate, and mono or not."""
    version = [header[1] | 1, header[1] & 0xFE]
    rates = [bits << 4 | header[2] & 0x0C | low for bits in range(1, 15) for low in range(4)]
    modes = range(0xC0, 0x100) if header[3] >> 6 == _MONO else range(0xC0)
    classes = (b"[" + b"".join(re.escape(bytes([b])) for b in allowed) + b"]" for allowed in (version, rates, modes))
    return re.compile(b"\xff" + b"".join(classes), re.DOTALL)


def _xing(header: bytes, num_frames: int) -> bytes:
    """A frame of silence with a Xing header: of the highest bit rate, so that it has room, and without a checksum."""
    header = bytes([header[0], header[1] | 1, (header[2] & ~_BIT_RATE_AND_PADDING & 0xFF) | 0xE0, header[3]])
    frame = _frame(header, 0)
    assert frame is not None
    said = b"Xing" + _FRAMES_FLAG.to_bytes(4, "big") + num_frames.to_bytes(4, "big")
    return (header + bytes(frame.side_bytes) + said).ljust(frame.num_bytes, b"\0")


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
    return _Frame(is_mpeg1, sample_rate, header[3] >> 6 == _MONO, size)
