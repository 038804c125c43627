"""The sound of videos as clips: lengths from packets, samples by FFmpeg, and what hostile bytes do."""

import contextlib
import importlib
from typing import Any

import numpy as np
import pytest
from audio.clips import sound
from numpy.typing import NDArray
from video.sounds import damaged, video_with_sound

from dataserver.audio import AudioHeader, AudioHeaderError, AudioShape, audio_fault_of, decode_mel
from dataserver.planning.job.fields import AudioSizing
from dataserver.video import read_sound, read_sound_header, read_video_header, sound_digest
from dataserver.video import sound as module
from dataserver.video.sound_digest import built_in_sounds

pytest.importorskip("av", reason="the extra video is not installed")
pytest.importorskip("soundfile", reason="the extra audio is not installed")
SIZING = AudioSizing(max_seconds=2, bins=80)


def shape_of(header: AudioHeader | None) -> AudioShape:
    assert header is not None
    return AudioShape(header.samples, header.sample_rate, header.channels)


def samples_of(data: bytes) -> NDArray[np.float32]:
    shape = shape_of(read_sound_header(data))
    return read_sound(data, shape, shape.samples)


def alike(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """The correlation of two sounds, as far as both go, at no offset."""
    most = min(len(found), len(expected))
    return float(np.corrcoef(found[:most], expected[:most])[0, 1])


@pytest.mark.parametrize(
    ("name", "rate", "channels", "form"),
    [
        ("aac", 44_100, 2, "mp4"),
        ("aac-mkv", 44_100, 1, "matroska"),
        ("mp3", 24_000, 2, "mp4"),
        ("opus", 48_000, 2, "matroska"),
        ("vorbis", 16_000, 1, "matroska"),
    ],
)
def test_each_codec_gives_the_sound_that_was_encoded(name: str, rate: int, channels: int, form: str) -> None:
    given = sound(1.0, rate, channels)
    data = video_with_sound(given, name, rate)
    header = read_sound_header(data)
    assert header is not None
    assert (header.format, header.sample_rate, header.channels) == (form, rate, channels)
    assert abs(header.samples / rate - 1.0) < 0.06  # containers round, and encoders fill up frames
    assert alike(samples_of(data), given.mean(axis=1)) > 0.95
    out = np.empty((SIZING.max_frames, 80), np.float32)
    assert decode_mel(data, shape_of(header), SIZING, out, read_sound)
    assert audio_fault_of(data, shape_of(header), read_sound) is None
    assert read_video_header(data).frames == 4


@pytest.mark.parametrize(("name", "rate"), [("aac-ts", 44_100), ("mp3-ts", 24_000)])
def test_sound_of_transport_streams_begins_with_what_its_encoder_puts_before(name: str, rate: int) -> None:
    """They cannot say that it is not to be played."""
    given = sound(1.0, rate, 2)
    data = video_with_sound(given, name, rate)
    header = read_sound_header(data)
    assert (shape_of(header).sample_rate, shape_of(header).channels) == (rate, 2)
    found, delays = samples_of(data), range(rate // 10)
    delay = max(delays, key=lambda n: alike(found[n : n + rate // 4], given[: rate // 4].mean(axis=1)))
    assert 1_000 < delay < 2_500
    assert alike(found[delay:], given.mean(axis=1)) > 0.95
    assert audio_fault_of(data, shape_of(header), read_sound) is None


def test_the_beginning_is_the_same_however_much_is_read() -> None:
    data = video_with_sound(sound(1.5, 48_000, 2))
    whole, shape = samples_of(data), shape_of(read_sound_header(data))
    for wanted in (1, 1_000, 48_000):
        assert np.array_equal(read_sound(data, shape, wanted), whole[:wanted])


def test_pauses_that_an_encoder_leaves_out_are_silence() -> None:
    tone = sound(1.0, 48_000)
    data = video_with_sound(tone, "opus", at=lambda ticks: ticks + 48_000 if ticks > 24_000 else ticks)
    assert shape_of(read_sound_header(data)).samples / 48_000 == pytest.approx(2.0, abs=0.06)
    found = samples_of(data)
    assert alike(found[:20_000], tone[:20_000, 0]) > 0.95
    assert not found[30_000:66_000].any()
    assert found[76_000:90_000].any()


def test_videos_without_sound_have_none() -> None:
    from video.clips import video

    assert read_sound_header(video("h264", 3)) is None
    assert read_sound_header(video_with_sound(has_packets=False)) is None


@pytest.mark.parametrize("name", ["aac", "opus"])
def test_damaged_sound_is_invalid_or_decodes_to_its_length(name: str) -> None:
    whole = video_with_sound(sound(1.0, 48_000), name)
    shape = shape_of(read_sound_header(whole))
    out = np.ones((SIZING.max_frames, 80), np.float32)
    for data in (damaged(whole), whole[: len(whole) // 2], b"", whole[:40] + bytes(500)):
        assert not decode_mel(data, shape, SIZING, out, read_sound), len(data)
        assert not out.any()
        assert audio_fault_of(data, shape, read_sound)


def test_another_rate_or_number_of_channels_than_in_the_index_is_invalid() -> None:
    data = video_with_sound()
    shape = shape_of(read_sound_header(data))
    for other in (shape._replace(sample_rate=44_100), shape._replace(channels=2)):
        assert "in the index" in str(audio_fault_of(data, other, read_sound))
    assert "ends after" in str(audio_fault_of(data, shape._replace(samples=96_000), read_sound))


def test_what_is_beyond_the_limits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(data: bytes) -> AudioHeaderError:
        with pytest.raises(AudioHeaderError) as caught:
            read_sound_header(data)
        return caught.value

    error = refused(video_with_sound(name="ac3"))
    assert (error.kind, error.detail) == ("unreadable_header", "its codec is ac3; AAC, MP3, Opus, Vorbis are read")
    lying = video_with_sound(name="opus", at=lambda ticks: ticks + 3_700 * 48_000 if ticks > 20_000 else ticks)
    error = refused(lying)
    assert error.kind == "audio_too_large"
    assert "3700 s" in error.detail
    for name, limit, words in (("MAX_SOUND_PACKETS", 3, "more than 3 packets"), ("MAX_CHANNELS", 0, "1 channels")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, limit)
            error = refused(video_with_sound())
            assert error.kind == "audio_too_large"
            assert words in error.detail


def test_damaged_bytes_never_raise() -> None:
    rng = np.random.default_rng(0)
    out = np.empty((SIZING.max_frames, 80), np.float32)
    for name in ("aac", "opus", "vorbis"):
        whole = video_with_sound(sound(0.3, 48_000), name)
        shape = shape_of(read_sound_header(whole))
        for _ in range(30):
            data = bytearray(whole)
            for at in rng.integers(0, len(data), 12):
                data[at] = int(rng.integers(0, 256))
            with contextlib.suppress(AudioHeaderError):
                read_sound_header(bytes(data))
            if not decode_mel(bytes(data), shape, SIZING, out, read_sound):
                assert not out.any()


def test_all_built_in_sounds_are_read_and_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [read_sound_header(data) for data in built_in_sounds()]
    assert [header and header.sample_rate for header in found] == [44_100, 24_000, 48_000, 16_000]
    digest = importlib.import_module("dataserver.video.sound_digest")  # not the function of the same name
    before, verdicts, decode = sound_digest(), list[bool](), digest.decode_mel

    def louder(*args: Any) -> bool:
        verdicts.append(decode(*args))
        args[3][0, 0] += 2**-16
        return verdicts[-1]

    monkeypatch.setattr(digest, "decode_mel", louder)
    sound_digest.cache_clear()
    assert sound_digest() != before
    sound_digest.cache_clear()
    assert verdicts == [True] * 4


def test_files_that_are_no_videos_are_refused() -> None:
    with pytest.raises(AudioHeaderError, match="no video"):
        read_sound_header(b"nothing")
