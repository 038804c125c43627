"""The page of a fleet gives the numbers of its servers, and says of the others what they are."""

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli.test_top import Liar, Stranger, grpc_server, half_read, metrics, mute
from disttrain.v1 import admin_service_pb2 as pb
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from ports import free_addresses
from serving.harness import FIXED_WINDOW, Running, index, running
from shards import break_images, write_pairs
from web.harness import fleet_page, fleet_when

from dataserver.reporting.fleet_calls import NamedServers
from dataserver.reporting.fleet_numbers import Answer
from dataserver.security import Channels
from dataserver.web.fleet_page import FleetPage, _failed
from dataserver.web.fleet_watch import FleetWatch

ANSWER_S = 5.0
"""How long a server that is mute is waited for: longer than a busy machine takes for a page."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    folder = index(write_pairs(tmp_path / "d", 16, 16, seed=6))
    break_images(folder, (3, 0))
    with running({"d": folder}, FIXED_WINDOW) as found:
        yield found


def looks(count: int) -> Any:
    return lambda found: len(found["history"]["time"]) >= count


def test_numbers_are_those_of_the_servers(server: Running) -> None:
    stream, job_id = half_read(server)
    sooner = metrics(server)  # the server goes on working ahead
    with fleet_page(server.address) as page:
        found = fleet_when(page, lambda f: looks(2)(f) and f["checks"] is not None)
        said = metrics(server)
    stream.cancel()
    (one,) = found["servers"]
    assert one["address"] == server.address
    assert [one[name] for name in ("streams", "cores")] == [1, said.cores]
    assert 1 <= sooner.invalid_images <= one["invalid_images"] <= said.invalid_images
    assert one["prefetch_limit"] == said.prefetch_limit_bytes > 0
    assert one["waits"]["consumer"] > 0, "nobody reads the stream"
    assert found["verdict"]["stage"] == "consumer"
    assert found["verdict"]["share"] == pytest.approx(1, abs=0.05)
    assert [(f["kind"], f["count"], f["most"]) for f in found["failures"]] == [
        ("invalid images", one["invalid_images"], server.address)
    ]
    ranks = found["ranks"]
    assert (ranks["job"], ranks["module"], ranks["rank"], ranks["lag"]) == ([job_id[:12]], ["vit"], [0], [None])
    assert sooner.ranks[0].ready_microbatches <= ranks["ready"][0] <= said.ranks[0].ready_microbatches
    (jobs,) = [entry for entry in found["caches"] if entry["name"] == "memory for jobs"]
    assert jobs["of"] == said.cached.limit
    assert found["checks"]["findings"] == [], "dataserver doctor has nothing to say of a server on loopback"


def test_throughput_is_taken_between_looks(server: Running) -> None:
    with fleet_page(server.address) as page:
        fleet_when(page, looks(1))
        before = metrics(server)
        server.read(server.create(job_of_two_steps()).job_id)
        after = metrics(server)
        images = after.decoded_images - before.decoded_images
        assert images > 0
        found = fleet_when(page, lambda f: sum(f["history"]["images_s"]) > 0)
        found = fleet_when(page, looks(len(found["history"]["time"]) + 2))
    times, rates = found["history"]["time"], found["history"]["images_s"]
    seconds = [later - sooner for sooner, later in pairwise(times)]
    assert sum(r * s for r, s in zip(rates[1:], seconds, strict=True)) == pytest.approx(images, rel=0.5)


def job_of_two_steps() -> dict[str, Any]:
    from serving.harness import job_data

    return job_data(datasets=[{"name": "d"}], end={"steps": 2}, generation={"ratio": "0"})


def test_servers_that_do_not_answer_are_named_and_the_page_goes_on(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataserver.reporting.fleet_look.ANSWER_S", ANSWER_S)
    (closed,) = free_addresses(1)
    odd = Stranger(b"\xff\xff\xff\xff no message")
    with mute() as silent, grpc_server(None) as other, grpc_server(odd) as stranger:
        names = (silent, closed, other, stranger, server.address)
        with fleet_page(*names) as page:
            begun = time.monotonic()
            fleet_when(page, lambda _: True)
            assert time.monotonic() - begun < ANSWER_S, "a page waits for no server"
            found = fleet_when(page, lambda f: len(f["servers"]) == len(names))
    problems = {one["address"]: one.get("problem") for one in found["servers"]}
    assert problems == {
        silent: "does not answer",
        closed: "does not answer",
        other: "no server of this release",
        stranger: "no server of this release",
        server.address: None,
    }


def test_what_a_hostile_server_says_is_text_and_no_rank_is_lost() -> None:
    class Hostile(Liar):
        def GetMetrics(self, request: Any, context: Any) -> pb.GetMetricsResponse:  # noqa: N802
            found = super().GetMetrics(request, context)
            found.uptime.CopyFrom(Duration(seconds=self.calls))
            found.wanted_cores = float("nan")
            found.cores = 1
            return found

    with grpc_server(Hostile()) as address, fleet_page(address) as page:
        found = fleet_when(page, looks(2))
    (one,) = found["servers"]
    assert one["wanted_cores"] is None
    assert found["num_ranks"] == len(found["ranks"]["rank"]) == 1000
    assert found["ranks"]["job"][0] == "\\x1b[2J[red]"
    assert len(found["ranks"]["module"][0]) < 1100


def test_a_defect_is_shown_and_the_page_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr("dataserver.web.fleet_watch.look", broken)
    monkeypatch.setattr("dataserver.web.fleet_watch.AFTER_DEFECT_S", 0.1)
    monkeypatch.setattr("dataserver.web.fleet_watch.CHECK_S", 0.1)
    with grpc_server(Liar()) as address, fleet_page(address) as page:
        found = fleet_when(page, lambda f: f["defects"] and looks(2)(f))
        assert found["defects"] == ["the setup of the servers cannot be looked at: RuntimeError: a defect"]
        monkeypatch.setattr("dataserver.web.fleet_watch.look", lambda *_: ([], {}))
        assert fleet_when(page, lambda f: not f["defects"])["checks"] is not None


def test_waits_of_a_server_that_was_silent_are_spread_over_its_silence() -> None:
    def said(uptime_s: int, decoding_s: int) -> pb.GetMetricsResponse:
        waits = pb.StageWaits(decoding=Duration(seconds=decoding_s))
        return pb.GetMetricsResponse(uptime=Duration(seconds=uptime_s), waits=waits)

    watch = FleetWatch(NamedServers(("a", "b"), Channels()), 2.0)
    watch.note([Answer("a", said(2, 4)), Answer("b", said(2, 1))])
    watch.note([Answer("a", said(62, 184), said(2, 4)), Answer("b", said(4, 3), said(2, 1))])
    (point,) = watch.newest()[2]
    assert point.waiting == (0.0, 3.0 + 1.0, 0.0)


def test_a_server_that_was_just_begun_with_does_not_decide_what_limits() -> None:
    waits = pb.StageWaits(planning=Duration(seconds=9000))
    watch = FleetWatch(NamedServers(("a",), Channels()), 2.0)
    watch.note([Answer("a", pb.GetMetricsResponse(uptime=Duration(seconds=9000), waits=waits))])
    assert json.loads(FleetPage(watch).document({}))["verdict"] is None


def test_failed_samples_are_texts_of_bounded_length_the_newest_first() -> None:
    hostile = "<img src=x onerror=alert(1)>\u202e\n" + "k" * 10_000
    failures = [
        pb.Failure(kind=kind, dataset="d", shard=hostile, key=f"{kind}", count=kind, last=Timestamp(seconds=kind))
        for kind in range(1, 301)
    ]
    told = {"a:1": pb.ListFailuresResponse(failures=failures), "b:1": pb.ListFailuresResponse()}
    found = _failed(told)
    assert [one["last"] for one in found] == list(range(300, 100, -1))
    assert {one["kind"] for one in found} == {"unknown"}
    assert all(len(one["shard"]) < 300 and one["shard"].isprintable() for one in found)
    assert [one["kind"] for one in _failed({"a:1": pb.ListFailuresResponse(failures=failures[:2])})] == [
        "read",
        "image",
    ]
