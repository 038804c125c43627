"""Headers of clips, and files that are damaged or lie."""

import contextlib
import struct

import numpy as np
import pytest
from audio.clips import clip, encoded, sound

from dataserver.audio import AudioHeaderError, AudioShape, audio_fault_of, decode_mel, read_audio_header
from dataserver.audio.header import AudioHeader
from dataserver.audio.mp3 import is_mp3, with_length
from dataserver.planning.job.fields import AudioSizing

pytest.importorskip("soundfile", reason="the extra audio is not installed")
NAMES = ("wav", "float", "flac", "mp3", "vorbis", "opus")
FRAME_BYTES = 417
"""Of the first frame of an MP3 at 44.1 kHz and 128 kbit/s, which is its Xing header."""


def shape_of(data: bytes) -> AudioShape:
    found = read_audio_header(data)
    return AudioShape(found.samples, found.sample_rate, found.channels)


@pytest.mark.parametrize("name", NAMES)
def test_headers_say_how_many_samples_are_decoded(name):
    data = clip(1.3, name, 48_000, channels=2)
    assert read_audio_header(data) == AudioHeader({"float": "wav"}.get(name, name), 62_400, 48_000, 2)
    assert audio_fault_of(data, shape_of(data)) is None


def test_mp3_without_a_length_is_counted():
    whole = clip(2, "mp3", 44_100, channels=2)
    bare = whole[FRAME_BYTES:]
    assert b"Xing" not in bare[:100]
    shape = shape_of(bare)
    assert 2 * 44_100 < shape.samples < 2 * 44_100 + 3 * 1152  # with the encoder's delay, which nothing says
    assert audio_fault_of(bare, shape) is None
    tagged = b"ID3\x04\0\0\0\0\x02\0" + bytes(256) + bare + b"TAG" + bytes(125)
    assert is_mp3(tagged)
    assert shape_of(tagged) == shape
    assert shape_of(bare[:-100]).samples == shape.samples - 1152  # a frame that is cut does not count
    assert with_length(whole) is whole


@pytest.mark.parametrize("name", NAMES)
def test_cut_files_are_invalid_or_shorter_and_never_crash(name):
    data = clip(1, name, 48_000)
    shape, out = shape_of(data), np.ones((102, 128), np.float32)
    for end in (20, 60, len(data) // 2, len(data) - 700):
        assert not decode_mel(data[:end], shape, AudioSizing(), out)
        assert not out.any()
        out.fill(1)


def test_damaged_bytes_are_never_an_exception():
    random = np.random.default_rng(1)
    for name in NAMES:
        data = np.frombuffer(clip(0.2, name, 16_000), np.uint8)
        shape, out = shape_of(data.tobytes()), np.empty((22, 128), np.float32)
        for _ in range(40):
            damaged = data.copy()
            at = random.integers(0, len(damaged), 8)
            damaged[at] = random.integers(0, 256, 8)
            decode_mel(damaged.tobytes(), shape, AudioSizing(), out)
            with contextlib.suppress(AudioHeaderError):
                read_audio_header(damaged.tobytes())
    assert np.isfinite(out).all()


def lying_wav(rate: int, channels: int, data_bytes: int) -> bytes:
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    parts = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", data_bytes)
    return b"RIFF" + struct.pack("<I", len(parts)) + parts + bytes(4000)


def lying_flac(samples: int) -> bytes:
    data = bytearray(clip(0.5, "flac"))
    low = int.from_bytes(data[18:26], "big") >> 36 << 36  # rate, channels, bits; then 36 bits of samples
    data[18:26] = (low | samples).to_bytes(8, "big")
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (lambda: lying_flac(16_000 * 36_000), r"audio_too_large: declares 36000 s, limit 3600"),
        (lambda: lying_flac(2**36 - 1), r"audio_too_large: declares 4294967 s, limit 3600"),
        (lambda: lying_wav(3999, 1, 4000), r"unreadable_header: declares 3999 Hz, not 4000 to 384000"),
        (lambda: lying_wav(16_000, 9, 3600), r"audio_too_large: declares 9 channels, limit 8"),
        (lambda: b"RIFF\0\0\0\0WAVE", r"unreadable_header: WAV: .*"),
        (lambda: b"fLaC" + bytes(100), r"unreadable_header: FLAC: .*"),
        (lambda: b"OggS" + bytes(24) + b"OpusHead" + bytes(50), r"unreadable_header: Ogg Opus: .*"),
        (lambda: b"an html page", r"neither WAV, FLAC, MP3, Ogg Vorbis nor Ogg Opus: starts with 616e2068"),
        (lambda: bytes(65 << 20), r"audio_too_large: 68157440 bytes, limit 67108864"),
    ],
)
def test_headers_that_cannot_be_used(data, expected):
    with pytest.raises(AudioHeaderError, match=expected):
        read_audio_header(data())


def test_a_header_that_promises_more_than_there_is_makes_the_clip_invalid():
    data = lying_flac(16_000 * 60)
    shape = shape_of(data)
    assert shape.samples == 960_000
    assert audio_fault_of(data, shape) == "it ends after 8000 of 960000 samples"
    assert audio_fault_of(data, shape._replace(samples=8000)) == (
        "it declares (960000, 16000, 1), and the index (8000, 16000, 1)"
    )


def test_a_file_that_does_not_say_its_length_is_counted():
    data = lying_flac(0)
    assert shape_of(data).samples == 8000
    assert audio_fault_of(data, shape_of(data)) is None


def test_what_is_not_finite_is_invalid():
    samples = sound(0.1, 16_000)
    samples[7] = np.nan
    data = encoded(samples, 16_000, "float")
    assert audio_fault_of(data, shape_of(data)) == "it holds values that are not finite"
