"""What a clip's header says of it, without decoding a sample."""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dataserver.audio.formats import AUDIO_FORMATS, audio_format_of
from dataserver.audio.limits import MAX_AUDIO_BYTES, MAX_AUDIO_SECONDS, MAX_CHANNELS, SAMPLE_RATES
from dataserver.audio.mp3 import with_length
from dataserver.extras import pip_install
from dataserver.header_error import HeaderError

if TYPE_CHECKING:
    from dataserver.audio.reading import OpenClip

REMEDY: Final = pip_install("audio")
"""What brings the libraries that this folder needs."""
_LONGEST: Final = MAX_AUDIO_SECONDS + 1
"""Seconds after which samples are not counted any further."""
_NEW_STREAM: Final = re.compile(rb"OggS\x00[\x02\x06]")
"""How an Ogg page begins that is the first one of a stream."""


class AudioHeaderError(HeaderError):
    """A clip whose header cannot be used: `unreadable_header` or `audio_too_large`."""


@dataclass(frozen=True, slots=True)
class AudioHeader:
    """What the header of a clip says."""

    format: str
    samples: int
    """Number of samples of each channel."""
    sample_rate: int
    """Samples a second of each channel."""
    channels: int


def require_audio() -> None:
    """Raise ValueError, which names the command that helps, where the libraries for audio are not installed."""
    try:
        import soundfile
        import soxr  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: soundfile is there, and its libsndfile is not
        raise ValueError(f"audio needs soundfile and soxr, which cannot be imported ({error}); {REMEDY}") from error
    if missing := _missing_formats():
        raise ValueError(
            f"audio needs a libsndfile that reads {', '.join(missing)}, and {soundfile.__libsndfile_version__} does "
            "not: pip install --force-reinstall soundfile (its wheels bring a whole one), or update libsndfile to 1.1"
        )


@functools.cache
def _missing_formats() -> tuple[str, ...]:
    """Formats that the installed libsndfile does not read, as messages call them."""
    import soundfile

    containers = soundfile.available_formats()
    return tuple(
        known.title
        for known in AUDIO_FORMATS
        if known.container not in containers or known.subtype not in soundfile.available_subtypes(known.container)
    )


def read_audio_header(data: bytes) -> AudioHeader:
    """Read the header of a clip; where it says no length, of an MP3 the headers of all frames, else all samples.

    Raises:
        AudioHeaderError: it cannot be read, or what it says is over the limits.
    """
    if len(data) > MAX_AUDIO_BYTES:
        raise AudioHeaderError("audio_too_large", f"{len(data)} bytes, limit {MAX_AUDIO_BYTES}")
    with open_clip(data) as (name, file):
        _check_layout(file.samplerate, file.channels)
        return check_header(AudioHeader(name, _samples_of(file), file.samplerate, file.channels))


def check_header(found: AudioHeader) -> AudioHeader:
    """Return a header that is within the limits. Raises AudioHeaderError where it is not."""
    _check_layout(found.sample_rate, found.channels)
    if found.samples < 1:
        raise AudioHeaderError("unreadable_header", "it has no samples")
    if found.samples > MAX_AUDIO_SECONDS * found.sample_rate:
        seconds = found.samples // found.sample_rate
        raise AudioHeaderError("audio_too_large", f"declares {seconds} s, limit {MAX_AUDIO_SECONDS}")
    return found


def _check_layout(sample_rate: int, channels: int) -> None:
    least, most = SAMPLE_RATES
    if not least <= sample_rate <= most:
        raise AudioHeaderError("unreadable_header", f"declares {sample_rate} Hz, not {least} to {most}")
    if not 1 <= channels <= MAX_CHANNELS:
        raise AudioHeaderError("audio_too_large", f"declares {channels} channels, limit {MAX_CHANNELS}")


@contextmanager
def open_clip(data: bytes, samples: int | None = None) -> "Iterator[tuple[str, OpenClip]]":
    """Open a clip; yields the format's name and the open file.

    Args:
        data: the clip.
        samples: of each channel that will be read; by default all, or so many that the clip is found to be too long.

    Raises:
        AudioHeaderError: it is none of the formats, or its header is damaged.
    """
    from dataserver.audio.reading import ERRORS, OpenClip

    found = audio_format_of(data)
    if found is None:
        *others, last = (known.title for known in AUDIO_FORMATS)
        known = f"neither {', '.join(others)} nor {last}"
        raise AudioHeaderError("unreadable_header", f"{known}: starts with {data[:8].hex()}")
    if found.container == "OGG" and (page := _NEW_STREAM.search(data, 1)):
        detail = f"chained: another stream begins at byte {page.start()}, and the first alone would be read"
        raise AudioHeaderError("unreadable_header", f"{found.title}: {detail}; write it as one stream")
    is_counted = False
    try:
        if found.name == "mp3":
            data, is_counted = with_length(data, samples)
        file = OpenClip(data, is_counted)
    except ERRORS as error:
        raise AudioHeaderError("unreadable_header", f"{found.title}: {error}") from error
    with file:
        if file.format not in (found.container, f"{found.container}EX"):
            raise AudioHeaderError("unreadable_header", f"{found.title}: it holds {file.format}")
        yield found.name, file


def _samples_of(file: "OpenClip") -> int:
    """Samples of each channel: as the file says, or else counted in one pass."""
    if file.has_length:
        return int(file.frames)
    from dataserver.audio.reading import ERRORS

    try:
        return sum(map(len, file.blocks_of(_LONGEST * file.samplerate)))
    except ERRORS as error:
        raise AudioHeaderError("unreadable_header", f"it says no length, and cannot be decoded: {error}") from error
