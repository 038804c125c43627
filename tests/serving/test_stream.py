"""One stream beside those that share its memory and threads, at moments that a whole server seldom meets."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2 import EndOfStream
from serving.harness import TIMEOUT_S

from dataserver.serving.errors import DataServiceError
from dataserver.serving.metrics import Metrics, Stage
from dataserver.serving.stream.fair_pool import FairPool
from dataserver.serving.stream.shared import Shared
from dataserver.serving.stream.stream import MicrobatchStream
from dataserver.serving.stream_memory import BufferPool, ByteBudget
from dataserver.serving.transport.direct_listener import DirectListener
from dataserver.serving.transport.grpc import GrpcTransport
from dataserver.serving.transport.interface import EncodedMicrobatch, Memory
from dataserver.serving.transport.shared_memory_listener import SharedMemoryListener

SIZE = 3 << 20
"""Bytes of a microbatch: three chunks."""


class Source:
    """Steps of one microbatch, whose bytes are all 7."""

    num_steps = 2
    job_id = "job"
    module = "m"
    prepared = 0

    def plan(self, step: int, _cancelled: Any) -> Any:
        return SimpleNamespace(step=step, num_microbatches=1)

    def specify(self, plan: Any, microbatch: int) -> Any:
        return SimpleNamespace(plan=plan, view=SimpleNamespace(microbatch=microbatch), num_bytes=SIZE)

    def prepare(self, _spec: Any, buffer: Any) -> Any:
        self.prepared += 1
        buffer[:] = 7
        return SimpleNamespace(tasks=[], finish=lambda: None, buffer=buffer, num_images=0, num_invalid=0)

    def encode(self, _spec: Any, prepared: Any, _checksummed: bool) -> EncodedMicrobatch:
        return EncodedMicrobatch(b"header", prepared.buffer)


@pytest.fixture
def shared() -> Iterator[Shared]:
    """Room for one microbatch of each stream, and one thread that lays out, one that decodes."""
    budget, laying_out, decoding = ByteBudget(0), FairPool(1, "layout"), FairPool(1, "decode")
    with ThreadPoolExecutor(8) as planning:
        yield Shared(
            stream_bytes=SIZE,
            ahead_bytes=8 * SIZE,
            budget=budget,
            buffers=BufferPool(budget),
            planning=planning,
            laying_out=laying_out,
            decoding=decoding,
            shared_memory=SharedMemoryListener(wanted=False),
            direct=DirectListener(),
            draining=threading.Event(),
            metrics=Metrics(),
        )
    laying_out.shutdown()
    decoding.shutdown()


def opened(shared: Shared, source: Any) -> MicrobatchStream:
    stream = MicrobatchStream(shared, source, 0, 0, lambda: None, lambda _: None)
    stream.start()
    return stream


def until(done: Callable[[], bool]) -> None:
    """Wait for something that must come."""
    end = time.monotonic() + TIMEOUT_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


def has_plan(stream: MicrobatchStream) -> bool:
    """Whether its next microbatch is to be laid out."""
    with stream._preparation._condition:
        return stream._preparation._plan is not None


def test_a_consumer_that_reads_as_its_memory_is_taken_gets_no_bytes_of_another_stream(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = opened(shared, Source())
    messages = stream.messages()
    assert next(messages) == b"header"
    ending, go = threading.Event(), threading.Event()
    put_down = stream._handing_out._put_down

    def put_down_late() -> None:
        if threading.current_thread() is watcher:
            ending.set()
            assert go.wait(TIMEOUT_S)
        put_down()

    def message(transport: GrpcTransport, memory: Memory, encoded: EncodedMicrobatch, i: int) -> bytes:
        go.set()
        watcher.join(TIMEOUT_S)
        shared.buffers.take(SIZE)[:] = 9  # another stream's
        return made(transport, memory, encoded, i)

    made = GrpcTransport.message
    monkeypatch.setattr(GrpcTransport, "message", message)
    monkeypatch.setattr(stream._handing_out, "_put_down", put_down_late)
    watcher = threading.Thread(target=stream.end_if_idle, args=(0.0,))
    watcher.start()
    assert ending.wait(TIMEOUT_S)
    rest = list(messages)
    go.set()
    watcher.join(TIMEOUT_S)
    end = EndOfStream(reason=EndOfStream.REASON_IDLE, next_step=0, next_microbatch=0)
    assert [pb.StreamMicrobatchesResponse.FromString(m) for m in rest] == [pb.StreamMicrobatchesResponse(end=end)]


def test_a_stream_that_is_closed_before_its_turn_to_be_laid_out_begins_nothing(shared: Shared) -> None:
    source, go = Source(), threading.Event()
    shared.laying_out.queue("another").submit(go.wait, TIMEOUT_S)
    stream = opened(shared, source)
    until(lambda: has_plan(stream))
    stream.close()
    go.set()
    shared.laying_out.queue(source.job_id).submit(print).result(TIMEOUT_S)
    assert source.prepared == 0
    assert shared.buffers.free_bytes == 0, "no memory was taken for it"


def test_a_wait_for_a_plan_and_one_for_a_turn_to_be_laid_out_are_told_apart(shared: Shared) -> None:
    """The latter is `decoding`: what helps is more cores, not another policy."""
    plan, turn = threading.Event(), threading.Event()

    class Slow(Source):
        def plan(self, step: int, cancelled: Any) -> Any:
            assert plan.wait(TIMEOUT_S)
            return super().plan(step, cancelled)

    shared.laying_out.queue("another").submit(turn.wait, 3 * TIMEOUT_S)
    stream, metrics = opened(shared, Slow()), shared.metrics
    with ThreadPoolExecutor(1) as consumer:
        first = consumer.submit(next, stream.messages())
        until(lambda: metrics.waited_s()[Stage.PLANNING] > 0)
        plan.set()
        until(lambda: metrics.waited_s()[Stage.DECODING] > 0)
        planning_s = metrics.waited_s()[Stage.PLANNING]
        turn.set()
        assert first.result(TIMEOUT_S) == b"header"
    assert metrics.waited_s()[Stage.PLANNING] == planning_s
    stream.close()


def test_a_job_with_many_streams_has_views_laid_out_as_often_as_one_with_a_single_stream(shared: Shared) -> None:
    """However many it opens, and whether anybody reads them or not."""
    go, prepared = threading.Event(), list[str]()

    class Noted(Source):
        def __init__(self, job_id: str) -> None:
            self.job_id = job_id

        def prepare(self, spec: Any, buffer: Any) -> Any:
            prepared.append(self.job_id)
            return super().prepare(spec, buffer)

    shared.laying_out.queue("another").submit(go.wait, TIMEOUT_S)
    streams = [opened(shared, Noted(job_id)) for job_id in ["crowd"] * 5]
    until(lambda: all(map(has_plan, streams)))
    streams.append(opened(shared, Noted("neighbour")))
    until(lambda: has_plan(streams[-1]))
    go.set()
    until(lambda: len(prepared) == len(streams))
    assert prepared == ["crowd", "neighbour", *["crowd"] * 4]
    for stream in streams:
        stream.close()


def test_a_microbatch_that_the_machine_has_no_memory_for_ends_its_stream(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(_: int) -> None:
        raise MemoryError

    monkeypatch.setattr(shared.buffers, "take", take)
    stream = opened(shared, Source())
    until(lambda: stream._preparation._exhausted)
    with pytest.raises(DataServiceError, match="MemoryError"):
        next(stream.messages())


def test_a_consumer_that_waits_for_a_plan_is_woken_when_its_stream_is_closed(shared: Shared) -> None:
    asked, planned = threading.Event(), threading.Event()

    class Late(Source):
        def plan(self, step: int, cancelled: Any) -> Any:
            asked.set()
            assert planned.wait(TIMEOUT_S)
            return super().plan(step, cancelled)

    stream, received = opened(shared, Late()), list[bytes]()
    consumer = threading.Thread(target=lambda: received.extend(stream.messages()), daemon=True)
    consumer.start()
    assert asked.wait(TIMEOUT_S)
    until(lambda: bool(stream._preparation._condition._waiters))  # type: ignore[attr-defined]
    stream.close()
    consumer.join(TIMEOUT_S)
    assert not consumer.is_alive()
    assert received == []
    planned.set()


def test_a_plan_that_comes_after_the_end_is_not_cached(shared: Shared) -> None:
    asked, closed = threading.Event(), threading.Event()

    class Late(Source):
        def plan(self, step: int, cancelled: Any) -> Any:
            asked.set()
            assert closed.wait(TIMEOUT_S)
            return super().plan(step, cancelled)

    stream = opened(shared, Late())
    assert asked.wait(TIMEOUT_S)
    stream.close()
    closed.set()
    shared.planning.shutdown()
    assert stream._preparation._plan is None
