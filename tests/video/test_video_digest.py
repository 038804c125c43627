"""The digest of videos tells decoders apart, and clients hold servers to it."""

import pytest
from disttrain.v1.data_service_pb2 import GetServerInfoResponse

from dataserver.video import digest, read_video_header, video_digest
from dataserver.video.digest import built_in_videos
from trainclient.stream.errors import ServerMismatchError
from trainclient.stream.fleet import Fleet

pytest.importorskip("av", reason="the extra video is not installed")


def test_all_built_in_videos_are_read() -> None:
    found = [read_video_header(data) for data in built_in_videos()]
    assert {(header.frames, header.microseconds, header.width, header.height) for header in found} == {
        (6, 600_000, 64, 64)
    }
    assert [header.format for header in found] == ["mp4", "mp4", "matroska", "matroska", "mp4", "mp4"]


def test_other_values_have_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before, decode, verdicts = video_digest(), digest.decode_frames, []

    def brighter(*args: object) -> bool:
        verdicts.append(decode(*args))  # type: ignore[arg-type]
        args[-1][0, 0] ^= 1  # type: ignore[index]
        return verdicts[-1]

    monkeypatch.setattr(digest, "decode_frames", brighter)
    digest.video_digest.cache_clear()
    assert digest.video_digest() != before
    digest.video_digest.cache_clear()
    assert verdicts == [True] * 12


def test_clients_compare_video_from_the_first_frame_on() -> None:
    fleet = Fleet("a.example:1,b.example:1")
    first, second = fleet.endpoints
    infos = [GetServerInfoResponse(content_digest="0", video_digest=video) for video in ("1", "2", "")]
    fleet.commit(first, infos[0], "audio")
    fleet.commit(second, infos[1])  # no frame came yet
    fleet.commit(first, infos[0], "video")
    fleet.commit(second, infos[2])  # it has none
    with pytest.raises(ServerMismatchError, match=r"^servers a.* and b.*, video digests 1 and 2: .* same video lib"):
        fleet.commit(second, infos[1])


def test_a_server_that_is_refused_is_compared_with_none() -> None:
    fleet = Fleet("a.example:1,b.example:1")
    first, second = fleet.endpoints
    one = GetServerInfoResponse(content_digest="0", audio_digest="1", video_digest="1", sound_digest="1")
    other = GetServerInfoResponse(content_digest="9", audio_digest="2", video_digest="2", sound_digest="2")
    fleet.commit(first, one)
    for kind in ("audio", "video"):
        with pytest.raises(ServerMismatchError, match="content digests 0 and 9"):
            fleet.commit(second, other, kind)
    for kind in ("audio", "video"):
        fleet.commit(first, one, kind)
