"""Log-mel spectrograms as Whisper's feature extractor computes them (arXiv 2212.04356, section 2.2).

Windows of 400 samples (periodic Hann) every 160, centred, the signal reflected at both ends of the padded clip; power;
Slaney's mel filters up to 8 kHz; log10 of at least 1e-10; nothing more than 8 below the largest value; (x + 4) / 4.

Computed in float64 without BLAS, whose kernels differ from processor to processor, and rounded to multiples of 2^-16: a
difference in the last bits changes a value only where it lies between two multiples. That is rare, and no guarantee:
`audio_digest` tells servers with other libraries apart.
"""

import functools
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.job.fields import HOP, SAMPLE_RATE

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

WINDOW: Final = 400
"""Samples that one frame of the spectrogram is made of."""
_HALF: Final = WINDOW // 2
_FLOOR: Final = 1e-10
_DYNAMICS: Final = 8.0
"""Powers of ten below the largest value at which a spectrogram is cut off."""
_STEPS: Final = 1 << 16
"""Parts of one that values are rounded to."""
_BLOCK: Final = 512
"""Frames that are transformed at once: their spectra fit the caches."""


class _Filters(NamedTuple):
    """Triangular filters as sums over runs of frequencies."""

    frequency: NDArray[np.int64]
    """int64 [k]: frequency of each weight, filter by filter."""
    weight: F64
    """Weights of the filters' entries, float64 [k]."""
    start: NDArray[np.int64]
    """int64 [bins]: first weight of each filter."""


def log_mel(samples: F32, frames: int, padded_samples: int, bins: int) -> F32:
    """The first frames of a clip's spectrogram.

    Args:
        samples: float32 [n] at 16 kHz, n <= padded_samples.
        frames: that are wanted, at most padded_samples / 160.
        padded_samples: length to which the clip is taken as filled up with zeros; at least 201.
        bins: mel bins.

    Returns:
        float32 [frames, bins].
    """
    signal = _reflected(samples, frames, padded_samples)
    windows = np.lib.stride_tricks.sliding_window_view(signal, WINDOW)[::HOP][:frames]
    filters, hann = _filters(bins), _hann()
    mel = np.empty((frames, bins))
    for first in range(0, frames, _BLOCK):
        spectrum = np.fft.rfft(windows[first : first + _BLOCK] * hann, axis=1)
        power = spectrum.real**2 + spectrum.imag**2
        mel[first : first + _BLOCK] = np.add.reduceat(
            power[:, filters.frequency] * filters.weight, filters.start, axis=1
        )
    logs = np.log10(np.maximum(mel, _FLOOR))
    np.maximum(logs, logs.max() - _DYNAMICS, out=logs)
    return (np.round((logs + 4.0) / 4.0 * _STEPS) / _STEPS).astype(np.float32)


def _reflected(samples: F32, frames: int, padded_samples: int) -> F64:
    """The part of the padded clip that these frames see, reflected where it begins, and where it ends."""
    needed = (frames - 1) * HOP + WINDOW
    signal = np.zeros(_HALF + padded_samples + _HALF)
    signal[_HALF : _HALF + len(samples)] = samples
    signal[:_HALF] = signal[2 * _HALF : _HALF : -1]
    end = _HALF + padded_samples
    signal[end:] = signal[end - 2 : end - 2 - _HALF : -1]
    return signal[:needed]


@functools.cache
def _hann() -> F64:
    """Hann's window, periodic: float64 [400]."""
    window: F64 = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    window.flags.writeable = False
    return window


@functools.lru_cache(8)
def _filters(bins: int) -> _Filters:
    """Slaney's filters, of unit area, at equal distances in mel from 0 to 8 kHz."""
    edges = _hertz(np.linspace(0.0, float(_mel(np.array(SAMPLE_RATE / 2))), bins + 2))
    frequencies = np.linspace(0.0, SAMPLE_RATE / 2, 1 + _HALF)
    slopes = edges[:, None] - frequencies
    rising, falling = -slopes[:-2] / np.diff(edges)[:-1, None], slopes[2:] / np.diff(edges)[1:, None]
    dense = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))[:, None]
    found = [row if len(row := np.flatnonzero(f)) else np.zeros(1, np.int64) for f in dense]  # narrow ones meet none
    start = np.concatenate([[0], np.cumsum([len(row) for row in found])[:-1]])
    weight = np.concatenate([f[row] for f, row in zip(dense, found, strict=True)])
    return _Filters(np.concatenate(found), weight, start)


_LINEAR_HZ: Final = 200.0 / 3
"""Hertz of one mel below `_BREAK_HZ`, from where mels are logarithmic."""
_BREAK_HZ: Final = 1000.0
_LOG_STEP: Final = np.log(6.4) / 27.0


def _mel(hertz: F64) -> F64:
    log = _BREAK_HZ / _LINEAR_HZ + np.log(np.maximum(hertz, _BREAK_HZ) / _BREAK_HZ) / _LOG_STEP
    return np.where(hertz < _BREAK_HZ, hertz / _LINEAR_HZ, log)


def _hertz(mel: F64) -> F64:
    broken = _BREAK_HZ / _LINEAR_HZ
    return np.where(mel < broken, mel * _LINEAR_HZ, _BREAK_HZ * np.exp(_LOG_STEP * (mel - broken)))
