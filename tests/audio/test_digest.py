"""The digest of audio tells libraries apart; `client/test_media_digests.py` holds servers to it."""

import pytest

from dataserver.audio import AudioShape, audio_digest, digest, read_audio_header
from dataserver.audio.digest import built_in_clips

pytest.importorskip("soundfile", reason="the extra audio is not installed")


def test_all_built_in_clips_are_read() -> None:
    found = [read_audio_header(data) for data in built_in_clips()]
    assert [header.format for header in found] == ["wav", "wav", "wav", "flac", "mp3", "vorbis", "opus"]
    assert {round(header.samples / header.sample_rate, 1) for header in found} == {0.1}


def test_other_values_have_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = audio_digest()
    decode = digest.decode_mel

    def louder(data: bytes, shape: AudioShape, sizing: object, out: object) -> bool:
        valid = decode(data, shape, sizing, out)
        out[0, 0] += 2**-16
        return valid

    monkeypatch.setattr(digest, "decode_mel", louder)
    digest.audio_digest.cache_clear()
    assert digest.audio_digest() != before
    digest.audio_digest.cache_clear()
