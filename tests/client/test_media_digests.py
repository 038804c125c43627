"""Servers whose media libraries give other values are told apart, each by the digest of what it sends."""

from types import SimpleNamespace

import numpy as np
import pytest
from disttrain.v1.data_service_pb2 import GetServerInfoResponse

from trainclient.stream.errors import ServerMismatchError
from trainclient.stream.fleet import Fleet
from trainclient.stream.follower import _media_of


@pytest.mark.parametrize(
    ("compared", "before", "sent"),
    [("audio", "", "audio"), ("video", "audio", "video"), ("sound", "video", "audio")],
)
def test_clients_compare_media_from_the_first_item_on(compared: str, before: str, sent: str) -> None:
    """The sound of videos is compared from the first spectrogram on."""
    fleet = Fleet("a.example:1,b.example:1")
    first, second = fleet.endpoints
    equal = {"content_digest": "0", **({"audio_digest": "0"} if compared == "sound" else {})}
    infos = [GetServerInfoResponse(**equal, **{f"{compared}_digest": digest}) for digest in ("1", "2", "")]
    fleet.commit(first, infos[0], before)
    fleet.commit(second, infos[1])  # none came yet
    fleet.commit(first, infos[0], sent)
    fleet.commit(second, infos[2])  # it has none
    words = rf"^servers a.* and b.*, {compared} digests 1 and 2: .* same {compared} lib"
    with pytest.raises(ServerMismatchError, match=words):
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


@pytest.mark.parametrize(("shape", "media"), [((4, 3), "video"), ((4, 2), ""), ((4,), ""), ((4, 3, 1), "")])
def test_a_grid_of_any_shape_is_looked_at(shape: tuple[int, ...], media: str) -> None:
    assert _media_of(SimpleNamespace(tensors={"grid": np.zeros(shape)})) == media  # type: ignore[arg-type]
