"""What servers hear of how far a caller is: what it took, and not what lies in buffers."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from client.fake_server import FakeServer
from client.fake_server import job_data as fake_job
from client.opened import ALL, Opened, Serve
from serving.harness import TIMEOUT_S, Running, index, job_data, running
from shards import write_pairs

from dataserver.serving.metrics import Progress
from dataserver.serving.stream.source import ViewSource
from trainclient.client import DataClient
from trainclient.stream import progress
from trainclient.stream.client import _is_first
from trainclient.stream.endpoint import Timeouts
from trainclient.stream.fleet import Fleet
from trainclient.stream.jobs import resolve_job


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, so that tests are short."""
    monkeypatch.setattr(progress, "SAY_EVERY_S", 0.1)


def until(server: Running, seen: Callable[[Progress], bool]) -> Progress:
    """What the server says of its one stream as soon as it is so."""
    end = time.monotonic() + TIMEOUT_S
    while not (found := server.server.streams.progress()) or not seen(found[0]):
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return found[0]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_server_knows_what_the_caller_took(tmp_path: Path, shared_memory: bool) -> None:
    folder = index(write_pairs(tmp_path / "d", 32, 16, seed=6))
    job = job_data(datasets=[{"name": "d"}], end={"steps": 40})
    with running({"d": folder}, shared_memory=shared_memory) as server:
        with DataClient(server.address, job, "vit", 0) as client:
            batch = next(client)
            found = until(server, lambda now: now.step is not None and now.sent_step > 2)
            assert found.step == 0, "what was sent waits in buffers"
            while batch.step < 2:
                batch = next(client)
            assert until(server, lambda now: now.step != 0).step in (1, 2)
            assert until(server, lambda now: now.step == 2).sent_step > 2
        with DataClient(server.address, job, "vit", 0, start_step=7) as client:
            next(client)
            assert until(server, lambda now: now.step == 7).waited_s == pytest.approx(client.wait_s, abs=1e-6)
            assert client.wait_s > 0


def test_a_server_that_takes_no_reports_is_left_in_peace(serve: Serve, patient: Timeouts) -> None:
    """One of an older release answers UNIMPLEMENTED."""
    server: FakeServer = serve()
    with Opened([server.address], patient, prefetch_bytes=0) as opened:  # else all is received at once
        first = next(opened.reader)
        reports = opened.reader._progress
        end = time.monotonic() + TIMEOUT_S
        while not reports._silent:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert reports._silent == {server.address}
        assert [(first.step, first.microbatch), *opened.read_all()] == ALL


@pytest.mark.parametrize(("module", "rank", "is_first"), [("vit", 0, True), ("llm", 0, False), ("llm", 1, False)])
def test_the_first_rank_of_the_first_module_speaks_for_all(
    serve: Serve, patient: Timeouts, module: str, rank: int, is_first: bool
) -> None:
    server: FakeServer = serve()
    fleet = Fleet(server.address, timeouts=patient)
    job = resolve_job(fake_job(), fleet)
    assert [m.name for m in job.spec.execution.modules][:2] == ["vit", "llm"]
    assert _is_first(job, module, rank) == _is_first(fake_job(), module, rank) == is_first
    assert _is_first({}, module, rank) == (rank == 0)
    with DataClient(server.address, job, module, rank, timeouts=patient) as client:
        assert client.fleet.speaks == is_first
    fleet.close()


def test_a_wait_is_reported_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server makes nothing more until it may: its storage hangs."""
    folder = index(write_pairs(tmp_path / "d", 32, 16, seed=6))
    job = job_data(datasets=[{"name": "d"}], end={"steps": 40})
    may = threading.Event()
    with running({"d": folder}) as server, DataClient(server.address, job, "vit", 0) as client:
        next(client)
        until(server, lambda now: now.step == 0)
        prepare = ViewSource.prepare
        monkeypatch.setattr(ViewSource, "prepare", lambda *given: (may.wait(TIMEOUT_S), prepare(*given))[1])
        caller = threading.Thread(target=lambda: [next(client) for _ in range(60)])
        caller.start()
        try:
            began = until(server, lambda now: (now.waited_s or 0) > 0.5)
            assert until(server, lambda now: (now.waited_s or 0) > (began.waited_s or 0)).step == began.step
            assert client.wait_s > 0.5
        finally:
            may.set()
            caller.join(TIMEOUT_S)
        assert client.wait_s < TIMEOUT_S
        waits = client.wait_s
        time.sleep(0.05)
        assert client.wait_s == waits, "no wait goes on"
