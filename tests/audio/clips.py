"""Clips of a fixed sound in any format."""

import io

import numpy as np
from numpy.typing import NDArray


def sound(seconds: float, rate: int, channels: int = 1, seed: int = 0) -> NDArray[np.float32]:
    """float32 [samples, channels]: a rising tone with some noise, another one in each channel."""
    times = np.arange(round(seconds * rate)) / rate
    tones = [np.sin(2 * np.pi * 220 * (c + 1) * times * (1 + 0.1 * times)) for c in range(channels)]
    noise = np.random.default_rng(seed).standard_normal((len(times), channels))
    return (0.3 * np.stack(tones, axis=1) + 0.02 * noise).astype(np.float32)


def encoded(samples: NDArray[np.float32], rate: int, name: str = "wav") -> bytes:
    """A clip of samples in a format."""
    import soundfile

    container, subtype = {
        "wav": ("WAV", "PCM_16"),
        "float": ("WAV", "FLOAT"),
        "flac": ("FLAC", "PCM_16"),
        "mp3": ("MP3", "MPEG_LAYER_III"),
        "vorbis": ("OGG", "VORBIS"),
        "opus": ("OGG", "OPUS"),
    }[name]
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=container, subtype=subtype)
    return file.getvalue()


def clip(seconds: float, name: str = "wav", rate: int = 16_000, channels: int = 1, seed: int = 0) -> bytes:
    """An encoded clip of `sound`."""
    return encoded(sound(seconds, rate, channels, seed), rate, name)
