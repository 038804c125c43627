"""What a real server says of itself over HTTP, held against what was really streamed."""

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.request import urlopen

import grpc
import pytest
from disttrain.v1 import data_service_pb2 as pb
from google.protobuf.duration_pb2 import Duration
from prometheus_client.parser import text_string_to_metric_families
from serving.harness import FIXED_WINDOW, TIMEOUT_S, Running, index, job_data, large_job, running
from shards import break_images, write_pairs

from dataserver.dataset import Dataset
from dataserver.serving.metrics import Metrics, Progress, Stage, by_rank
from dataserver.serving.stream.assembly import with_retries

UNITS = (
    "bytes",
    "seconds",
    "microbatches",
    "images",
    "cores",
    "streams",
    "jobs",
    "errors",
    "evictions",
    "remakes",
    "retries",
    "step",
    "plans",
    "requests",
    "failures",
    "fds",
    "fallbacks",
    "calls",
    "requests",
    "failures",
)
Values = dict[tuple[str, ...], float]


@contextmanager
def serving(folder: Path, **config: Any) -> Iterator[Running]:
    with running({"d": folder}, FIXED_WINDOW, metrics_listen="127.0.0.1:0", **config) as found:
        yield found


def families(server: Running) -> list[Any]:
    with urlopen(f"http://{server.metrics_address}/metrics", timeout=TIMEOUT_S) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def values(server: Running) -> Values:
    """By name without the prefix, and values of the labels."""
    return {
        (sample.name.removeprefix("disttrain_"), *sample.labels.values()): sample.value
        for family in families(server)
        for sample in family.samples
    }


def until(server: Running, done: Callable[[Values], bool]) -> Values:
    """The values, as soon as they are as they must become."""
    end = time.monotonic() + TIMEOUT_S
    while not done(found := values(server)):
        assert time.monotonic() < end, found
        time.sleep(0.05)
    return found


def one_pass(**changes: Any) -> dict[str, Any]:
    return job_data(datasets=[{"name": "d"}], end={"epochs": 1}, generation={"ratio": "0"}, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return index(write_pairs(tmp_path / "d", 16, 16, seed=6))


def test_every_metric_has_help_and_its_unit_in_its_name(folder: Path) -> None:
    with serving(folder) as server:
        stream = server.stream(server.create(one_pass()).job_id)
        next(stream)
        found = families(server)
        stream.cancel()
    assert sum(family.name.startswith("disttrain_") for family in found) == 36
    for family in found:
        assert family.documentation, family.name
        assert family.name.endswith(UNITS), family.name
        without_series = ("disttrain_rank_", "disttrain_certificate_expiry_")
        assert family.samples or family.name.startswith(without_series), family.name


def test_the_documentation_lists_every_metric(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    listed = set(re.findall(r"`(disttrain_\w+)`", page.partition("## Alerts")[0]))
    with serving(folder) as server:
        found = {family.name + "_total" * (family.type == "counter") for family in families(server)}
    assert listed == {name for name in found if name.startswith("disttrain_")}


def test_the_numbers_are_those_of_what_was_streamed(folder: Path) -> None:
    break_images(folder, (3, 0), (5, 0))
    shard = Dataset.open(folder).shards[0]
    with serving(folder) as server:
        job = server.create(one_pass())
        received = [server.read(job.job_id, "vit", rank) for rank in (0, 1)]
        # A stream ends before its call: only then is it forgotten.
        found = until(server, lambda now: now[("open_streams",)] == 0)
    headers = [header for stream in received for header, _ in stream.microbatches]
    assert found[("decoded_images_total", "valid")] == 14
    assert found[("decoded_images_total", "invalid")] == 2
    assert found[("read_bytes_total", "shards")] == sum(shard.image(row, 0).length for row in range(16))
    assert found[("prepared_microbatches_total",)] == found[("sent_microbatches_total",)] == len(headers)
    payload = sum(len(body) for stream in received for _, body in stream.microbatches)
    overhead = sum(len(header.SerializeToString()) for header in headers)
    assert payload + overhead <= found[("sent_bytes_total",)] <= payload + overhead + 16 * len(headers)
    assert found[("plan_seconds_count",)] == found[("plan_seconds_bucket", "+Inf")] == job.num_steps
    assert found[("plan_seconds_sum",)] > 0
    assert found[("known_jobs",)] == 1
    for kind in ("jobs", "tables", "windows", "plans"):
        assert 0 < found[("cached_job_bytes", kind)] <= found[("cached_job_limit_bytes",)]
        assert found[("cached_job_evictions_total", kind)] == found[("cached_job_remakes_total", kind)] == 0
    assert found[("storage_errors_total",)] == found[("storage_retries_total",)] == 0
    assert found[("storage_failures_total",)] == 0
    assert found[("prefetch_used_bytes",)] == 0
    assert found[("process_resident_memory_bytes",)] > 1 << 20
    assert {key for key in found if key[0].startswith("rank_")} == set()


def test_plans_that_find_no_room_are_counted_each_time_they_are_made(folder: Path) -> None:
    with serving(folder) as server:
        data = job_data(datasets=[{"name": "d"}], end={"steps": 4}, generation={"ratio": "0"}, global_batch=4)
        job = server.create(data)
        plans = server.server.jobs._cache.plans
        plans._budget = 1  # one plan, the last one used, is cached whatever it costs
        for rank in (0, 1):
            server.read(job.job_id, "vit", rank)
        found = until(server, lambda now: now[("open_streams",)] == 0)
    assert job.num_steps == 4
    assert found[("cached_job_evictions_total", "plans")] >= 2 * job.num_steps - 1
    assert found[("cached_job_remakes_total", "plans")] == job.num_steps
    assert found[("plan_seconds_count",)] == 2 * job.num_steps


def test_an_unread_stream_shows_until_it_is_closed(photographs: Path) -> None:
    job = large_job(datasets=[{"name": "d"}], global_batch=8, microbatch=2, end={"steps": 3})
    with serving(photographs, prefetch_bytes=6 << 20) as server:
        job_id = server.create(job).job_id
        rank = (job_id[:12], "vit", "0")
        stream = server.stream(job_id)
        next(stream)
        found = until(server, lambda now: now.get(("rank_ready_microbatches", *rank), 0) >= 2)
        later = until(
            server,
            lambda now: all(
                now[key] > found[key]
                for key in (
                    ("waited_seconds_total", "consumer"),
                    ("waited_seconds_total", "memory"),
                    ("rank_unread_seconds", *rank),
                )
            ),
        )
        assert later[("open_streams",)] == 1
        assert ("rank_step", *rank) not in later
        assert later[("queued_microbatches", "ready")] == later[("rank_ready_microbatches", *rank)]
        assert 0 < later[("prefetch_used_bytes",)] <= later[("prefetch_limit_bytes",)] == 6 << 20
        rest = list(stream)
        assert rest[-1].WhichOneof("message") == "end"
        gone = until(server, lambda now: now[("open_streams",)] == 0)
        assert {key for key in gone if key[0].startswith("rank_")} == set()
        for stage in Stage:
            assert gone[("waited_seconds_total", stage.value)] >= later[("waited_seconds_total", stage.value)]


def waits(found: Values) -> list[float]:
    return [found[("waited_seconds_total", stage.value)] for stage in Stage]


@pytest.mark.parametrize("idle", [True, False])
def test_nothing_waits_for_a_stream_that_was_given_up(photographs: Path, idle: bool) -> None:
    """Whether its client cancelled it, or it was idle for too long and its call alone is left."""
    job = large_job(datasets=[{"name": "d"}], global_batch=8, microbatch=2, end={"steps": 3})
    with serving(photographs, prefetch_bytes=4 << 20, idle_timeout_s=1 if idle else 600) as server:
        stream = server.stream(server.create(job).job_id)
        next(stream)
        until(server, lambda now: now[("waited_seconds_total", "memory")] > 0)
        if not idle:
            stream.cancel()
        found = until(server, lambda now: now[("open_streams",)] == 0)
        assert stream.is_active() == idle
        assert {key for key in found if key[0].startswith("rank_")} == set()
        last: list[list[float]] = [[]]

        def still(now: Values) -> bool:
            last.append(waits(now))
            return last[-2] == last[-1]

        until(server, still)
        stream.cancel()


def test_a_rank_is_at_the_step_that_its_client_said_last(photographs: Path) -> None:
    """Of two streams of a rank the one behind counts; what was sent does not."""
    job = large_job(datasets=[{"name": "d"}], global_batch=8, microbatch=8, end={"steps": 9})
    with serving(photographs) as server:
        job_id = server.create(job).job_id
        streams = [server.stream(job_id, start_step=step, progress_token=bytes([step])) for step in (4, 2)]
        for stream in streams:
            next(stream)

        def said(token: bytes, step: int) -> float | None:
            request = pb.ReportProgressRequest(progress_token=token, step=step)
            server.stub.ReportProgress(request, timeout=TIMEOUT_S)
            return values(server).get(("rank_step", job_id[:12], "vit", "0"))

        assert said(bytes([4]), 4) is None
        assert said(bytes([2]), 2) == 2
        assert said(bytes([2]), 3) == 3
        assert said(b"", 9) == said(b"unknown", 9) == 3
        with pytest.raises(grpc.RpcError, match="progress_token has 17 bytes; at most 16 are allowed"):
            said(bytes(17), 9)
        with pytest.raises(grpc.RpcError, match="step 18446744073709551615 was reported; the job has 9 steps"):
            said(bytes([2]), 2**64 - 1)
        assert said(bytes([2]), 8) == 4, "the other stream is behind"
        for stream in streams:
            stream.cancel()


def test_a_rank_has_waited_as_long_as_its_client_said(photographs: Path) -> None:
    job = large_job(datasets=[{"name": "d"}], global_batch=8, microbatch=8, end={"steps": 9})
    with serving(photographs) as server:
        job_id = server.create(job).job_id
        stream = server.stream(job_id, progress_token=b"a")
        next(stream)

        def said(**waited: int) -> float | None:
            duration = Duration(**waited) if waited else None
            request = pb.ReportProgressRequest(progress_token=b"a", step=0, waited=duration)
            server.stub.ReportProgress(request, timeout=TIMEOUT_S)
            return values(server).get(("rank_waited_seconds_total", job_id[:12], "vit", "0"))

        assert said() is None, "a client of an older release"
        assert said(seconds=2, nanos=500_000_000) == 2.5
        for hostile in ({"seconds": -1}, {"nanos": -1}, {"seconds": 2**63 - 1}):
            with pytest.raises(grpc.RpcError, match="0 to 1000000000 s are allowed"):
                said(**hostile)
        assert said(seconds=10**9, nanos=2**31 - 1) > 10**9
        stream.cancel()


def test_storage_that_fails_shows(folder: Path, tmp_path: Path) -> None:
    with serving(folder) as server:
        job_id = server.create(one_pass()).job_id
        server.catalog.datasets["d"].shards[0].sizes()
        shutil.move(folder / "00000.tar", tmp_path / "away.tar")
        with pytest.raises(grpc.RpcError):
            server.read(job_id)
        found = until(server, lambda now: now[("storage_errors_total",)] > 0)
        shutil.move(tmp_path / "away.tar", folder / "00000.tar")
        server.read(job_id)
        after = values(server)
    assert found[("storage_retries_total",)] < found[("storage_errors_total",)]
    assert 0 < found[("storage_failures_total",)] == after[("storage_failures_total",)]
    assert found[("sent_microbatches_total",)] < after[("sent_microbatches_total",)]


def test_waits_count_while_they_go_on_and_once() -> None:
    metrics = Metrics()
    wait = metrics.begin(Stage.MEMORY)
    before = metrics.waited_s()[Stage.MEMORY]
    while metrics.waited_s()[Stage.MEMORY] == before:
        time.sleep(0.001)
    metrics.end(wait)
    done = metrics.waited_s()
    metrics.end(wait)
    metrics.end(None)
    assert metrics.waited_s() == done
    assert done[Stage.MEMORY] > 0
    assert sum(done.values()) == done[Stage.MEMORY]


def test_peers_of_a_rank_are_one_entry() -> None:
    def stream(rank: int, sent: int | None, ready: int, unread_s: float) -> Progress:
        return Progress("job", "llm", rank, sent, sent, ready, 1, unread_s)

    streams = (stream(1, 4, 0, 0.0), stream(0, 7, 3, 0.5), stream(0, 6, 5, 0.0), stream(1, None, 2, 9.0))
    assert by_rank(streams) == [stream(0, 6, 3, 0.5), stream(1, None, 0, 9.0)]


def test_a_read_that_nobody_wants_any_more_has_not_failed_for_good() -> None:
    metrics, stop = Metrics(), threading.Event()

    def read() -> None:
        stop.set()
        raise OSError("it hangs up")

    with pytest.raises(OSError, match="it hangs up"):
        with_retries(read, stop, metrics)
    with pytest.raises(OSError, match="it is gone"):
        with_retries(Mock(side_effect=OSError("it is gone")), threading.Event(), metrics)
    counts = metrics.counts()
    assert (counts.storage_errors, counts.storage_retries, counts.storage_failures) == (5, 3, 1)
