"""The video formats that are read, by how files begin."""

import codecs
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_BOXES: Final = frozenset({b"ftyp", b"moov", b"wide", b"mdat"})
"""What MP4 and QuickTime files begin with."""
_NO_VIDEO: Final = (b"avif", b"avis", b"heic", b"heix", b"hevc", b"mif1", b"msf1", b"M4A ", b"M4B ", b"M4P ")
"""Brands of MP4 files that are images, or sound."""
_PACKET_BYTES: Final = 188
"""Bytes of a packet of an MPEG transport stream; all packets begin with the same byte."""
_SYNC: Final = 0x47
_PACKETS: Final = 3, 16
"""Least packets of a stream, and how many of those that are there are looked at: text has that byte now and then."""
CODECS: Final = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4")
"""What may lie in a container, by FFmpeg's names. Decoders of others are never opened."""
DECODERS: Final = (*CODECS, "libdav1d", "libvpx", "libvpx-vp9")
"""FFmpeg's decoders of these: some go by other names."""


@dataclass(frozen=True, slots=True)
class VideoFormat:
    """A video format: how it is recognised, and who reads it."""

    name: str
    title: str
    """The format's name in messages."""
    container: str
    """Name of the reader of FFmpeg for the format."""
    matches: Callable[[bytes], bool]
    """Whether a file begins as one of this format."""


def _is_mp4(data: bytes) -> bool:
    return data[4:8] in _BOXES and not (data[4:8] == b"ftyp" and data[8:12] in _NO_VIDEO)


def _is_transport_stream(data: bytes) -> bool:
    least, most = (number * _PACKET_BYTES for number in _PACKETS)
    return len(data) >= least and set(data[:most:_PACKET_BYTES]) == {_SYNC}


VIDEO_FORMATS: Final = (
    VideoFormat("mp4", "MP4", "mov", _is_mp4),
    VideoFormat("matroska", "WebM or Matroska", "matroska", lambda data: data[:4] == b"\x1aE\xdf\xa3"),
    VideoFormat("mpegts", "an MPEG transport stream", "mpegts", _is_transport_stream),
)
"""An index stores the position of a format in this tuple: a new one is added at the end."""
VIDEO_FORMAT_NAMES: Final = tuple(found.name for found in VIDEO_FORMATS)
VIDEO_SUFFIXES: Final = frozenset(
    {"mp4", "m4v", "mov", "webm", "mkv", "ts"} | {"avi", "mpg", "mpeg", "m2ts", "wmv", "flv", "3gp", "ogv"}
)
"""Types of files that claim to be videos; how they begin decides what they are. Those that are not read are
findings."""

TEXT_SUFFIXES: Final = frozenset({"ts"})
"""Those that texts have as well: the sources of TypeScript are called as transport streams are."""
_TEXT_BYTES: Final = 4096
"""Bytes of a file that tell whether it is a text."""


def is_text(data: bytes) -> bool:
    """Whether a file begins as a text in UTF-8; no video does."""
    begin = data[:_TEXT_BYTES]
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begin)
    except UnicodeDecodeError:
        return False
    return b"\0" not in begin


def video_format_of(data: bytes) -> VideoFormat | None:
    """The format of a file by how it begins; None for anything else."""
    return next((found for found in VIDEO_FORMATS if found.matches(data)), None)
