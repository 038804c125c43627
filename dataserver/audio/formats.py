"""The audio formats that are read, by how files begin."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dataserver.audio.mp3 import is_mp3

_OGG_HEADER: Final = 28
"""Bytes of the header of the first page of an Ogg file with one short packet, which names the codec."""


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """An audio format: how it is recognised, and who reads it."""

    name: str
    title: str
    """The format's name in messages."""
    container: str
    """Name of the container in libsndfile."""
    subtype: str
    """The encoding that libsndfile has to know, by its name for it."""
    matches: Callable[[bytes], bool]
    """Whether a file begins as one of this format."""


AUDIO_FORMATS: Final = (
    AudioFormat("wav", "WAV", "WAV", "PCM_16", lambda data: data[:4] == b"RIFF" and data[8:12] == b"WAVE"),
    AudioFormat("flac", "FLAC", "FLAC", "PCM_16", lambda data: data[:4] == b"fLaC"),
    AudioFormat("mp3", "MP3", "MP3", "MPEG_LAYER_III", is_mp3),
    AudioFormat("vorbis", "Ogg Vorbis", "OGG", "VORBIS", lambda data: _begins_ogg(data, b"\x01vorbis")),
    AudioFormat("opus", "Ogg Opus", "OGG", "OPUS", lambda data: _begins_ogg(data, b"OpusHead")),
)
"""Those of files that are audio alone."""
AUDIO_FORMAT_NAMES: Final = ("wav", "flac", "mp3", "vorbis", "opus", "mp4", "matroska")
"""What a clip may lie in: the formats above, and those of videos, whose sound it is. An index stores the position of a
name in this tuple: a new one is added at the end."""
AUDIO_SUFFIXES: Final = frozenset(
    {"wav", "flac", "mp3", "ogg", "oga", "opus"} | {"m4a", "aac", "aif", "aiff", "aifc", "wma", "amr", "wv", "webm"}
)
"""Types of files that claim to be audio; how they begin decides what they are. Those that are not read are findings."""


def audio_format_of(data: bytes) -> AudioFormat | None:
    """The format of a file by how it begins; None for anything else."""
    return next((found for found in AUDIO_FORMATS if found.matches(data)), None)


def _begins_ogg(data: bytes, packet: bytes) -> bool:
    return data[:4] == b"OggS" and data.startswith(packet, _OGG_HEADER)
