"""Consumers that stop reading: their slots and memory go to others, and they come back where they stopped."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2 import EndOfStream
from serving.harness import FIXED_WINDOW, TIMEOUT_S, Running, large_job, reason_of, receive, running

from dataserver.serving.stream import handing_out

IDLE_S = 1
SLOTS = 64


@contextmanager
def serving(photographs: Path, **config: Any) -> Iterator[Running]:
    settings = {"idle_timeout_s": IDLE_S, "prefetch_bytes": 0, **config}
    with running({"photos": photographs}, FIXED_WINDOW, **settings) as found:
        yield found


def job() -> dict[str, Any]:
    """About one MiB of patches per microbatch."""
    return large_job(global_batch=8, microbatch=2, end={"steps": 3})


def until_admitted(server: Running, job_id: str) -> Any:
    """A stream, as soon as there is a slot for it, and its first message."""
    while True:
        stream = server.stream(job_id)
        try:
            return itertools.chain([next(stream)], stream)
        except grpc.RpcError as error:
            if reason_of(error)[1:3] != ("TOO_MANY_STREAMS", "RETRY"):
                raise
            time.sleep(0.1)


def how_it_ended(stream: Any) -> Any:
    """The reason of the end message, or the status."""
    try:
        return receive(stream).end.reason
    except grpc.RpcError as error:
        return error.code()


def test_streams_that_nobody_reads_free_their_slots_and_go_on_where_they_were(photographs: Path) -> None:
    with serving(photographs, max_streams=SLOTS) as server:
        job_id = server.create(job()).job_id
        whole = server.read(job_id)
        unread = [server.stream(job_id) for _ in range(SLOTS)]
        firsts = [next(stream) for stream in unread]
        receive(until_admitted(server, job_id))
        assert server.server.streams.wait_until_idle(TIMEOUT_S)
        assert server.server.streams.shared.budget.used == 0
        for first, stream in zip(firsts, unread, strict=True):
            part = receive(itertools.chain([first], stream))
            count = len(part.microbatches)
            assert part.blob() == whole.blob()[:count]
            header = whole.microbatches[count][0]
            assert part.end == pb.EndOfStream(
                reason=EndOfStream.REASON_IDLE, next_step=header.step, next_microbatch=header.microbatch
            )
        rest = server.read(job_id, start_step=part.end.next_step, start_microbatch=part.end.next_microbatch)
        assert part.blob() + rest.blob() == whole.blob()


def test_the_oldest_idle_calls_are_cancelled_where_more_wait_than_there_are_slots(photographs: Path) -> None:
    with serving(photographs, max_streams=2) as server:
        job_id = server.create(job()).job_id
        unread = [until_admitted(server, job_id) for _ in range(5)]
        assert server.server.streams.wait_until_idle(TIMEOUT_S)
        ends = [how_it_ended(stream) for stream in unread]
        cancelled, idle = grpc.StatusCode.CANCELLED, EndOfStream.REASON_IDLE
        assert ends[:2] == [cancelled, cancelled]
        assert sorted(ends[2:4], key=str) == [idle, cancelled], "they became idle together"
        assert ends[4] == idle
        assert server.read(job_id).end.reason == EndOfStream.REASON_END_OF_JOB


def test_a_consumer_that_takes_a_microbatch_in_each_timeout_keeps_its_stream(
    photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(handing_out, "monotonic", lambda: now)
    with serving(photographs) as server:
        job_id = server.create(job()).job_id
        whole, stream = server.read(job_id), server.stream(job_id)
        for i in range(len(whole.microbatches)):
            assert receive(stream, 1).blob() == whole.blob()[i : i + 1]
            now += 0.9 * IDLE_S
            time.sleep(0.4 * IDLE_S)  # the server looks for idle streams
        assert receive(stream).end == whole.end


def test_an_idle_stream_that_has_sent_all_ends_as_the_job_does(photographs: Path) -> None:
    with serving(photographs, max_streams=1) as server:
        job_id = server.create(job()).job_id
        whole = server.read(job_id)
        last = whole.microbatches[-1][0]
        stream = server.stream(job_id, start_step=last.step, start_microbatch=last.microbatch)
        first = next(stream)
        assert server.server.streams.wait_until_idle(TIMEOUT_S)
        found = receive(itertools.chain([first], stream))
        assert (found.blob(), found.end) == (whole.blob()[-1:], whole.end)
