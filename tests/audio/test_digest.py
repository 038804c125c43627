"""The digest of audio tells libraries apart, and clients hold servers to it."""

import pytest
from disttrain.v1.data_service_pb2 import GetServerInfoResponse

from dataserver.audio import AudioShape, audio_digest, digest, read_audio_header
from dataserver.audio.digest import built_in_clips
from trainclient.stream.errors import ServerMismatchError
from trainclient.stream.fleet import Fleet

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


def test_clients_compare_audio_from_the_first_spectrogram_on() -> None:
    fleet = Fleet("a.example:1,b.example:1")
    first, second = fleet.endpoints
    infos = [GetServerInfoResponse(content_digest="0", audio_digest=audio) for audio in ("1", "2", "")]
    fleet.commit(first, infos[0])
    fleet.commit(second, infos[1])  # no spectrogram came yet
    fleet.commit(first, infos[0], "audio")
    fleet.commit(second, infos[2])  # it has none
    with pytest.raises(ServerMismatchError, match=r"^servers a.* and b.*, audio digests 1 and 2: .* same audio lib"):
        fleet.commit(second, infos[1])
