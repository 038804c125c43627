"""From an encoded clip to its spectrogram: decode, mean of the channels, resample, log-mel.

The rules of audio version 1:

1. A format of `formats.py`, told by how the file begins, decoded by libsndfile to float32. Samples, rate and channels
   must be those in the index; an MP3 that does not say its length is given the number of its frames.
2. The first `max_seconds`, rounded up to whole samples; a file that ends before them is invalid.
   What comes behind them is not decoded.
3. The mean of all channels.
4. Resampled to 16 kHz by soxr, quality VHQ, to ceil(samples x 16,000 / rate) samples: cut, or filled up with zeros.
5. Filled up with zeros to `max_seconds`, and `mel.log_mel` of the whole. Of a clip that is not padded the first frames
   are served: those that its tower's convolutions reach (`served_frames`).

Values that are not finite, or beyond `LOUDEST`, make a clip invalid.

Of the sound of a video steps 1 to 3 are those of `dataserver.video.sound`.
"""

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from dataserver.audio.header import AudioHeaderError, open_clip
from dataserver.audio.limits import LOUDEST, MAX_AUDIO_BYTES
from dataserver.audio.mel import F32, log_mel
from dataserver.planning.job.fields import HOP, MAX_CLIP_SECONDS, SAMPLE_RATE, AudioSizing, clip_samples

AUDIO_VERSION: Final = 1
"""Version of the rules above."""
_QUALITY: Final = "VHQ"
"""HQ computes in float32, with other results where a processor has other vector instructions; this one in float64."""

logger = logging.getLogger(__name__)


class InvalidAudioError(Exception):
    """These bytes are not a usable clip; leaves no function but a `ReadMono`."""


class AudioShape(NamedTuple):
    """What the index says of a clip."""

    samples: int
    """Number of samples of each channel."""
    sample_rate: int
    channels: int


ReadMono = Callable[[bytes, AudioShape, int], F32]
"""The mean of all channels of a clip's first so many samples, float32 [samples]; InvalidAudioError where there is
none."""


def decode_mel(data: bytes, shape: AudioShape, sizing: AudioSizing, out: F32, read: ReadMono | None = None) -> bool:
    """Decode a clip into its spectrogram.

    Args:
        data: the encoded clip.
        shape: what the index says of it.
        sizing: of spectrograms.
        out: float32 [frames, bins], C-contiguous, overwritten.
        read: reads the samples; by default those of a file that is audio alone.

    Returns:
        True; or False, with zeros in `out`, where `data` is not a usable clip: a pure function of the arguments.

    Raises:
        MemoryError: the machine, not the clip, is at fault.
    """
    try:
        samples = _decode(data, shape, sizing.max_seconds, read or _read_mono)
    except InvalidAudioError as error:
        logger.debug("a clip of %d bytes cannot be decoded: %s", len(data), error)
        out.fill(0)
        return False
    out[...] = log_mel(samples, len(out), sizing.max_frames * HOP, sizing.bins)
    return True


def audio_fault_of(data: bytes, shape: AudioShape, read: ReadMono | None = None) -> str | None:
    """Say why servers deliver a clip as invalid; None where they deliver it.

    Decodes the first 30 seconds, the most that any job reads: a job that reads less of a clip may find it valid. Its
    samples are read as by `decode_mel`.

    Raises:
        MemoryError: the machine, not the clip, is at fault.
    """
    try:
        _decode(data, shape, MAX_CLIP_SECONDS, read or _read_mono)
    except InvalidAudioError as error:
        return str(error)
    return None


def _decode(data: bytes, shape: AudioShape, max_seconds: int, read: ReadMono) -> F32:
    """The first seconds of a clip at 16 kHz. float32 [samples]."""
    if len(data) > MAX_AUDIO_BYTES:
        raise InvalidAudioError(f"{len(data)} bytes, limit {MAX_AUDIO_BYTES}")
    wanted = min(shape.samples, max_seconds * shape.sample_rate)
    mono = read(data, shape, wanted)
    loudest = float(np.abs(mono).max(initial=0))
    if not loudest <= LOUDEST:  # nor is what is not finite
        raise InvalidAudioError(f"it holds values up to {loudest:g}, which are not finite or beyond {LOUDEST:g}")
    return _resampled(mono, shape.sample_rate)


def _read_mono(data: bytes, shape: AudioShape, wanted: int) -> F32:
    """The mean of all channels. float32 [wanted]."""
    from dataserver.audio.reading import ERRORS

    found = np.empty(wanted, np.float32)
    at = 0
    try:
        with open_clip(data, wanted) as (_, file):
            says_length = file.has_length and not file.is_counted
            stored = AudioShape(file.frames if says_length else shape.samples, file.samplerate, file.channels)
            if stored != shape:
                raise InvalidAudioError(f"it declares {stored[:]}, and the index {shape[:]}")
            for part in file.blocks_of(wanted):
                found[at : at + len(part)] = part.mean(axis=1)
                at += len(part)
    except AudioHeaderError as error:
        raise InvalidAudioError(str(error)) from error
    except ERRORS as error:
        raise InvalidAudioError(f"{type(error).__name__}: {error}") from error
    if at < wanted:
        raise InvalidAudioError(f"it ends after {at} of {shape.samples} samples")
    return found


def _resampled(mono: F32, sample_rate: int) -> F32:
    if sample_rate == SAMPLE_RATE:
        return mono
    import soxr

    found = np.zeros(clip_samples(len(mono), sample_rate), np.float32)
    made = soxr.resample(mono, sample_rate, SAMPLE_RATE, quality=_QUALITY)[: len(found)]
    found[: len(made)] = made
    return found
