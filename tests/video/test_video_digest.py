"""The digest of videos tells decoders apart; `client/test_media_digests.py` holds servers to it."""

import pytest

from dataserver.video import digest, read_video_header, video_digest
from dataserver.video.digest import built_in_videos

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
