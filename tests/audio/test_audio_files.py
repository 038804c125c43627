"""Headers of clips, and files that are damaged or lie."""

import contextlib
import struct

import numpy as np
import pytest
from audio.clips import clip, encoded, sound

from dataserver.audio import (
    AudioHeaderError,
    AudioShape,
    audio_fault_of,
    decode_mel,
    header,
    read_audio_header,
    require_audio,
)
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
    assert with_length(whole) == (whole, False)


@pytest.mark.parametrize("name", NAMES)
def test_cut_files_are_invalid_or_shorter_and_never_crash(name):
    data = clip(1, name, 48_000)
    shape, out = shape_of(data), np.ones((102, 128), np.float32)
    for end in (20, 60, len(data) // 2, len(data) - 700):
        assert not decode_mel(data[:end], shape, AudioSizing(), out)
        assert not out.any()
        out.fill(1)


@pytest.mark.parametrize("rate", [16_000, 48_000])
def test_damaged_bytes_are_never_an_exception(rate):
    random = np.random.default_rng(1)
    for name in NAMES:
        data = np.frombuffer(clip(0.2, name, rate), np.uint8)
        shape, out = shape_of(data.tobytes()), np.empty((22, 128), np.float32)
        for _ in range(40):
            damaged = data.copy()
            at = random.integers(0, len(damaged), 8)
            damaged[at] = random.integers(0, 256, 8)
            valid = decode_mel(damaged.tobytes(), shape, AudioSizing(), out)
            assert np.isfinite(out).all()
            assert valid or not out.any()
            with contextlib.suppress(AudioHeaderError):
                read_audio_header(damaged.tobytes())


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
    assert audio_fault_of(data, shape_of(data)) == ("it holds values up to nan, which are not finite or beyond 1e+10")


@pytest.mark.parametrize("loudest", [3e38, 2e10])
def test_what_overflows_in_resampling_is_invalid(loudest):
    samples = np.where(np.arange(4410) % 2, loudest, -loudest).astype(np.float32)[:, None]
    data = encoded(samples, 44_100, "float")
    out = np.ones((12, 128), np.float32)
    assert not decode_mel(data, shape_of(data), AudioSizing(), out)
    assert not out.any()
    assert audio_fault_of(encoded(samples / loudest * 2.0**31, 44_100, "float"), shape_of(data)) is None


def vbri(whole: bytes, frames: int) -> bytes:
    """A file with a VBRI header instead of its own, that says so many frames."""
    said = b"VBRI" + struct.pack(">HHHIIHHHH", 1, 0, 75, len(whole), frames, 0, 1, 2, 1)
    return (whole[:4] + bytes(32) + said).ljust(FRAME_BYTES, b"\0") + whole[FRAME_BYTES:]


def test_vbri_headers_are_not_believed():
    """libsndfile takes the length of such a file from its first bit rate."""
    whole = clip(2, "mp3", 44_100, channels=2)
    shape = shape_of(whole[FRAME_BYTES:])
    data = vbri(whole, 3)
    assert is_mp3(data)
    assert shape_of(data) == shape
    assert audio_fault_of(data, shape) is None


def test_bytes_between_frames_are_skipped_up_to_a_limit():
    bare = clip(0.5, "mp3", 44_100, channels=2)[FRAME_BYTES:]
    shape = shape_of(bare)
    twice = shape_of(bare + bare)
    assert twice.samples > 1.9 * shape.samples
    picture = b"ID3\x04\0\0" + bytes([1, 0, 0, 0]) + b"\xff" * (1 << 21)
    assert shape_of(bare + picture + bare) == twice  # tags have a length
    assert shape_of(bare + b"TAG" + bytes(125) + bare) == twice
    ape = b"APETAGEX" + struct.pack("<IIII8x", 2000, 1 << 21, 1, 1 << 31) + b"\xff" * (1 << 21)
    assert shape_of(bare + ape) == shape
    with pytest.raises(AudioHeaderError, match=r"unreadable_header: MP3: more than 1048576 bytes between its frames"):
        read_audio_header(bare + b"\xff" * (1 << 21) + bare)
    with pytest.raises(AudioHeaderError, match=r"MP3: more than 1048576 bytes between its frames"):
        read_audio_header(bare + (b"ID3\x04" + bytes(6)) * (1 << 21))


def test_a_decode_reads_no_more_frames_than_it_needs():
    data = clip(4, "mp3", 44_100, channels=2)[FRAME_BYTES:]
    shape = shape_of(data)
    first, second = (np.empty((100, 128), np.float32) for _ in range(2))
    assert decode_mel(data, shape, AudioSizing(max_seconds=1), first)
    counted = with_length(data)[0]
    short, is_counted = with_length(data, 44_100)
    assert is_counted
    assert 43 * 417 < len(short) < len(counted) / 3
    assert decode_mel(counted, shape, AudioSizing(max_seconds=1), second)
    assert np.array_equal(first, second)


def test_an_mp3_of_more_than_an_hour_is_not_counted_to_its_end():
    silence = clip(0.1, "mp3", 44_100, channels=2)[:4] + bytes(FRAME_BYTES - 4)
    data = silence * 150_000
    with pytest.raises(AudioHeaderError, match=r"audio_too_large: declares 3601 s, limit 3600"):
        read_audio_header(data)


def test_bytes_between_a_tag_and_the_first_frame():
    bare = clip(0.5, "mp3", 44_100, channels=2)
    tag = b"ID3\x04\0\0\0\0\x02\0" + bytes(256)
    for body in (bare, bare[FRAME_BYTES:]):
        assert shape_of(tag + bytes(3000) + body) == shape_of(body)
        assert audio_fault_of(tag + bytes(3000) + body, shape_of(body)) is None
        assert not is_mp3(tag + bytes(70_000) + body)


@pytest.mark.parametrize("name", ["vorbis", "opus"])
def test_chained_streams_are_refused(name):
    one = clip(0.2, name, 48_000)
    with pytest.raises(AudioHeaderError, match=rf"chained: another stream begins at byte {len(one)}"):
        read_audio_header(one + clip(0.3, name, 48_000, seed=1))


def test_lint_judges_what_jobs_may_read():
    data = clip(33, "flac", 8000)
    shape = shape_of(data)
    assert audio_fault_of(data[:-600], shape) is None
    assert audio_fault_of(data[: len(data) // 2], shape) is not None
    promised = lying_flac(16_000 * 3600)
    assert audio_fault_of(promised, shape_of(promised)) == "it ends after 8000 of 57600000 samples"


def test_a_libsndfile_without_a_format_is_named(monkeypatch):
    import soundfile

    header._missing_formats.cache_clear()
    with monkeypatch.context() as changed:
        changed.setattr(soundfile, "available_formats", lambda: {"WAV": "", "FLAC": "", "OGG": ""})
        with pytest.raises(ValueError, match=r"reads MP3, and .* not: pip install"):
            require_audio()
    header._missing_formats.cache_clear()
    require_audio()
