"""What servers remember of failures is brought together, and what it says of a fleet."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from disttrain.v1 import admin_service_pb2 as pb
from disttrain.v1.admin_service_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from google.protobuf.timestamp_pb2 import Timestamp
from reporting.test_fleet_checks import NOW, fleet

from dataserver.reporting import fleet_failures
from dataserver.reporting.fleet_failures import FailureWatch, failed_in, unreadable
from dataserver.reporting.fleet_numbers import Answer

READ, IMAGE, TEXT = pb.FAILURE_KIND_READ, pb.FAILURE_KIND_IMAGE, pb.FAILURE_KIND_TEXT


def failure(kind: Any, ago: float = 60, **fields: Any) -> pb.Failure:
    known = {"dataset": "d", "shard": "s.tar", "count": 1, "reason": "gone", "last": Timestamp(seconds=int(NOW - ago))}
    return pb.Failure(kind=kind, **{**known, **fields})


def told(*failures: pb.Failure) -> pb.ListFailuresResponse:
    return pb.ListFailuresResponse(failures=failures)


def test_a_sample_that_fails_at_several_servers_is_one_and_the_newest_comes_first() -> None:
    found = failed_in(
        {
            "a:1": told(failure(READ, 50), failure(IMAGE, 90, key="7", count=3, reason="older")),
            "b:1": told(failure(IMAGE, 20, key="7", count=2, reason="newer\x1b[2J"), failure(IMAGE, 70, key="8")),
            "c:1": told(failure(IMAGE, 99, key="7"), failure(IMAGE, 99, key="7"), failure(99, 98)),  # type: ignore[arg-type]
        }
    )
    assert [(f.kind, f.key, f.count, f.servers) for f in found] == [
        ("image", "7", 7, ("a:1", "b:1", "c:1")),
        ("read", "", 1, ("a:1",)),
        ("image", "8", 1, ("b:1",)),
        ("unknown", "", 1, ("c:1",)),
    ]
    assert found[0].reason == "newer\\x1b[2J"
    assert failed_in({"a:1": told(failure(READ, last=Timestamp(seconds=-(2**62))))})[0].when == "-"


def test_reads_and_token_ids_that_fail_are_findings_for_an_hour() -> None:
    servers = fleet()
    names = [one.address for one in servers]
    said = {
        names[0]: told(failure(READ, 60), failure(READ, 90, shard="t.tar", count=9), failure(IMAGE, 1, key="x")),
        names[1]: told(failure(READ, 3590), failure(TEXT, 10, key="k")),
        names[2]: told(failure(READ, 3700, dataset="old")),
        "silent:1": told(failure(READ, 1)),
    }
    texts, reads = unreadable(servers, said, NOW)
    assert (reads.servers, texts.servers) == ((names[0], names[1]), (names[1],))
    assert reads.what == "reads of shard t.tar and of 1 more of dataset d failed: gone"
    assert texts.what == "token ids of shard s.tar, sample k of dataset d failed: gone"
    assert reads.remedy != texts.remedy


class Failing(AdminServiceServicer):
    """A server whose failures were asked for so many times."""

    calls = 0

    def ListFailures(self, _request: Any, _context: Any) -> pb.ListFailuresResponse:  # noqa: N802
        self.calls += 1
        return told(failure(READ, count=self.calls))


@contextmanager
def serving(servicer: AdminServiceServicer) -> Iterator[tuple[str, grpc.Channel]]:
    server = grpc.server(ThreadPoolExecutor(2))
    add_AdminServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with grpc.insecure_channel(address) as channel:
        yield address, channel
    server.stop(None)


def test_servers_are_asked_again_where_counters_have_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(fleet_failures, "monotonic", lambda: clock[0])
    failing = Failing()
    with serving(failing) as (one, channel), serving(AdminServiceServicer()) as (older, other):
        watch = FailureWatch({one: channel, older: other})

        def look(later_s: float, errors: int) -> int:
            clock[0] += later_s
            now = pb.GetMetricsResponse(storage_errors=errors)
            found = watch.look([Answer(one, now), Answer(older, now), Answer("silent:1", problem="does not answer")])
            assert [(f.kind, f.servers) for f in found] == [("read", (one,))]
            return found[0].count

        assert look(0, 1) == 1
        assert look(9, 1) == 1, "nothing new"
        assert look(1, 2) == 2, "a counter has grown"
        assert look(1, 3) == 2, "not so soon"
        assert look(31, 3) == 3, "now and then"
    assert failing.calls == 3
