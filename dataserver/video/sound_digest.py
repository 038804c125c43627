"""The digest of what this installation makes of the sound of known videos."""

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from dataserver.audio import AUDIO_VERSION, AudioShape, decode_mel
from dataserver.planning.job.fields import AudioSizing
from dataserver.video.sound import SOUND_VERSION, read_sound, read_sound_header

_SOUNDS: Final = Path(__file__).with_name("reference_sounds")
_SIZING: Final = AudioSizing.model_construct(max_seconds=1)


@functools.cache
def sound_digest() -> str:
    """Return SHA-256, hexadecimal, of the spectrograms that this installation makes of the sound of a few videos.

    Servers whose FFmpeg or soxr would give other values differ in it.
    """
    digest = hashlib.sha256(f"disttrain sound {SOUND_VERSION}, audio {AUDIO_VERSION}\n".encode())
    for data in built_in_sounds():
        header = read_sound_header(data)
        assert header is not None
        shape = AudioShape(header.samples, header.sample_rate, header.channels)
        out = np.empty((_SIZING.max_frames, _SIZING.bins), np.float32)
        digest.update(b"valid\n" if decode_mel(data, shape, _SIZING, out, read_sound) else b"invalid\n")
        digest.update(out.astype("<f4").tobytes())
    return digest.hexdigest()


def built_in_sounds() -> Iterator[bytes]:
    """Yield a video with sound of each codec."""
    for name in ("aac.mp4", "mp3.mkv", "opus.webm", "vorbis.webm"):
        yield (_SOUNDS / name).read_bytes()
