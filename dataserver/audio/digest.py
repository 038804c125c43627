"""The digest of what this installation makes of known clips."""

import functools
import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from dataserver.audio.decoding import AUDIO_VERSION, AudioShape, decode_mel
from dataserver.audio.header import read_audio_header
from dataserver.planning.job.fields import AudioSizing

_CLIPS: Final = Path(__file__).with_name("reference_clips")
SIZINGS: Final = (
    AudioSizing.model_construct(max_seconds=1),
    AudioSizing.model_construct(bins=80, merge=1, padded=True, max_seconds=1),
)


@functools.cache
def audio_digest() -> str:
    """Return SHA-256, hexadecimal, of the spectrograms that this installation makes of a small built-in set.

    Servers whose libraries would give other values (another libsndfile or soxr) differ in it. Takes half a second, most
    of it to load these.
    """
    digest = hashlib.sha256(f"disttrain audio {AUDIO_VERSION}\n".encode())
    for data in built_in_clips():
        header = read_audio_header(data)
        shape = AudioShape(header.samples, header.sample_rate, header.channels)
        for sizing in SIZINGS:
            out = np.empty((sizing.max_frames, sizing.bins), np.float32)
            digest.update(b"valid\n" if decode_mel(data, shape, sizing, out) else b"invalid\n")
            digest.update(out.astype("<f4").tobytes())
    return digest.hexdigest()


def built_in_clips() -> Iterator[bytes]:
    """Yield a clip of each format, and WAVs of rates that are resampled."""
    for rate, channels in ((8_000, 1), (44_100, 2), (96_000, 8)):
        yield _wav(rate, channels)
    for name in ("flac.flac", "mp3.mp3", "vorbis.ogg", "opus.ogg"):  # a rising tone of 0.1 s
        yield (_CLIPS / name).read_bytes()


def _wav(rate: int, channels: int) -> bytes:
    """A tenth of a second of a fixed pattern of integers."""
    times = np.arange(rate // 10)[:, None] * (1 + np.arange(channels))
    samples: bytes = ((times * times * 7 + times * 301) % 20_011 - 10_005).astype("<i2").tobytes()
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    parts = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(parts)) + parts
