"""Transforms of users in jobs that a real server serves."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from builders.jobs import module
from disttrain.v1 import data_service_pb2 as pb
from serving.harness import Running, index, job_data, reason_of, running, tensors
from shards import write_pairs

from dataserver.images.transforms import TRANSFORMS, ImageTransform
from dataserver.planning.job.fields import HorizontalFlip

TINT = {"kind": "installed", "name": "tint", "version": "1.2.0", "options": {"most": 90}}
NAMED = {"tint": "1.2.0", "raises": "1.2.0", "sleeps": "1.2.0"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = index(write_pairs(tmp_path_factory.mktemp("shards") / "pairs", 8, 2))
    with running({"pairs": folder}, transforms=NAMED, transform_timeout_s=2) as found:
        found.catalog.transforms.check()
        yield found


def job(*transforms: dict[str, Any]) -> dict[str, Any]:
    data = job_data(
        datasets=[{"name": "pairs"}],
        modules=[module("encoder", dp=1), module("backbone", dp=1)],
        generation={"ratio": "0"},
        end={"steps": 1},
    )
    return data | {"stream": data["stream"] | ({"transforms": list(transforms)} if transforms else {})}


def patches(server: Running, *transforms: dict[str, Any]) -> tuple[list[int], bytes]:
    """Validities, and the patches of all microbatches."""
    received = server.read(server.create(job(*transforms)).job_id, "vit").microbatches
    validity = [one for header, _ in received for one in header.items.validity]
    return validity, b"".join(tensors(*one)["patches"].tobytes() for one in received)


def test_a_server_serves_what_an_installed_transform_makes(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same function as a transform of the server itself gives the same bytes: words, order and scaling."""
    flip = {"kind": "horizontal_flip"}
    validity, found = patches(server, flip, TINT)
    plain = patches(server, flip)[1]
    assert set(validity) == {2}
    assert len(found) == len(plain)
    assert found != plain
    assert patches(server, flip, {**TINT, "options": {"most": 1}})[1] == plain

    def tint(pixels: np.ndarray, _options: Any, words: Any) -> np.ndarray:
        rng = np.random.Generator(np.random.Philox(key=list(words[:2])))
        return np.clip(pixels + rng.integers(0, 90, 3), 0, 255).astype(np.uint8)

    monkeypatch.setitem(TRANSFORMS, HorizontalFlip, ImageTransform(tint))
    with_flips = patches(server, {"kind": "random_resized_crop", "min_area": "1"}, TINT)[1]
    own = {"kind": "horizontal_flip", "probability": "0.25"}  # which is `tint` now
    assert patches(server, {"kind": "random_resized_crop", "min_area": "1"}, own)[1] == with_flips


def test_an_image_that_it_fails_for_is_invalid(server: Running) -> None:
    validity, found = patches(server, {"kind": "installed", "name": "raises", "version": "1.2.0"})
    assert set(validity) == {3}
    assert not any(found)


def test_one_that_takes_too_long_is_unavailable_and_the_next_job_is_served(server: Running) -> None:
    created = server.create(job({"kind": "installed", "name": "sleeps", "version": "1.2.0"}))
    with pytest.raises(grpc.RpcError) as failed:
        server.read(created.job_id, "vit")
    code, reason, action, text = reason_of(failed.value)
    assert (code, reason, action) == (grpc.StatusCode.UNAVAILABLE, "TRANSFORM_UNAVAILABLE", "RETRY")
    assert "sample " in text
    assert "the transform sleeps=1.2.0 took more than 2 s and was killed" in text
    assert set(patches(server, TINT)[0]) == {2}


def test_a_server_refuses_jobs_with_what_its_operator_did_not_name(server: Running) -> None:
    for transform in ({**TINT, "version": "1.2.1"}, {**TINT, "name": "prints"}):
        with pytest.raises(grpc.RpcError) as failed:
            server.create(job(transform))
        code, reason, action, text = reason_of(failed.value)
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TRANSFORM_UNKNOWN")
        assert action == "ANOTHER_SERVER"
        assert f"add --transform {transform['name']}={transform['version']}" in text


def test_a_server_says_which_transforms_it_has(server: Running) -> None:
    found = server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60).transforms
    assert [(one.name, one.version) for one in found] == sorted(NAMED.items())


def test_name_version_and_options_are_parts_of_the_stream(server: Running) -> None:
    streams = [
        server.create(job(*transforms)).stream_id
        for transforms in ((), (TINT,), ({**TINT, "options": {"most": 91}},), ({**TINT, "options": {"most": "90"}},))
    ]
    assert len(set(streams)) == 4
    complete = json.loads(server.create(job(TINT)).canonical_job_spec_json)
    assert complete["stream"]["transforms"] == [TINT]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "1 2"}, "the version of a package is required"),
        ({"options": {"x": 1.5}}, "options.x"),
        ({"options": {"x": [1]}}, "options.x"),
        ({"options": {str(n): n for n in range(33)}}, "at most 32"),
        ({"options": {"x": "y" * 1025}}, "at most 1024"),
    ],
)
def test_what_no_job_can_ask_for(server: Running, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        server.create(job({**TINT, **changes}))
    assert reason_of(failed.value)[1] == "JOB_INVALID"
    assert message in reason_of(failed.value)[3]
