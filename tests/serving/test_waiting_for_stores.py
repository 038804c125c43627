"""Decoding threads wait for no store: what was asked for is handed to them when it has come."""

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from benchmarks.range_server import State
from disttrain.v1 import data_service_pb2 as pb
from serving.harness import Running, index, job_data, receive, running
from shards import write_pairs
from stores import no_stores, stores

from dataserver.assembly import Coming, UnreadableError
from dataserver.dataset import BLOCKS, ShardReadError
from dataserver.dataset.storage import bucket_client, retries
from dataserver.dataset.storage.client_interface import UnavailableError
from dataserver.planning.stream.sliding import PARTS
from dataserver.serving.metrics import Metrics
from dataserver.serving.stream.assembly import Assembly
from dataserver.tracing import opened

__all__ = ["no_stores", "stores"]

WAIT_S = 60
HANGS_S = 25.0
"""Less than a server asks a store again for one image."""
SILENCE_S = 5
"""After which one answer is given up, and asked for again."""
THREADS = 2


class Waiting:
    """A task with bytes on their way."""

    def __init__(self, count: int) -> None:
        self.futures: list[Future[bytes]] = [Future() for _ in range(count)]
        self.runs = 0

    def __call__(self) -> int:
        self.runs += 1
        return 7

    def coming(self) -> list[Coming]:
        return [Coming(future, (0, 3), Path("s3:/bucket/3.tar")) for future in self.futures]


class Made:
    """An assembly of such tasks, which has begun."""

    def __init__(self, pool: ThreadPoolExecutor, *tasks: Waiting) -> None:
        self.settled = threading.Event()
        self.noted: list[UnreadableError] = []
        prepared = SimpleNamespace(tasks=tasks, finish=lambda: None, num_images=1, num_invalid=0)
        source: Any = SimpleNamespace(
            prepare=lambda *_: prepared,
            encode=lambda *_: SimpleNamespace(num_bytes=0),
            note_unreadable=lambda error, _: self.noted.append(error),
        )
        self.metrics = Metrics()
        spec: Any = SimpleNamespace(num_bytes=0)
        memory: Any = SimpleNamespace(buffer=b"", transport=SimpleNamespace(sends_payload=True))
        settled: Callable[[Assembly], None] = lambda _: self.settled.set()  # noqa: E731
        self.assembly = Assembly(spec, memory, self.metrics, settled, opened(None, "prepare"))
        self.assembly.start(source, pool)


def test_a_task_runs_when_all_its_bytes_have_come() -> None:
    with ThreadPoolExecutor(1) as pool:
        task = Waiting(2)
        made = Made(pool, task)
        task.futures[1].set_result(b"")
        assert not made.settled.wait(0.1)
        assert pool.submit(lambda: task.runs).result(WAIT_S) == 0
        task.futures[0].set_exception(OSError("a reset, which the task reads again"))
        assert made.settled.wait(WAIT_S)
    assert (task.runs, made.assembly.error, made.noted) == (1, None, [])


def test_what_a_store_gave_up_ends_the_microbatch_without_a_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        task = Waiting(2)
        made = Made(pool, task)
        task.futures[0].set_result(b"")
        task.futures[1].set_exception(UnavailableError("s3://bucket does not answer: 503; given up"))
        assert made.settled.wait(WAIT_S)
    said = "cannot read s3:/bucket/3.tar: [Errno 5] s3://bucket does not answer: 503; given up; check the storage"
    assert (task.runs, str(made.assembly.error)) == (0, said)
    (noted,) = made.noted
    assert (noted.dataset, noted.shard) == (0, 3)
    counts = made.metrics.counts()
    assert (counts.storage_errors, counts.storage_retries, counts.storage_failures) == (1, 0, 1)


def test_what_is_still_on_its_way_is_not_waited_for_when_another_task_failed() -> None:
    with ThreadPoolExecutor(1) as pool:
        task, late = Waiting(1), Waiting(1)
        made = Made(pool, task, late)
        task.futures[0].set_exception(UnavailableError("503; given up"))
        assert made.settled.wait(WAIT_S)
        late.futures[0].set_result(b"")
    assert (task.runs, late.runs) == (0, 0)
    assert "503; given up" in str(made.assembly.error)


def test_a_microbatch_that_is_given_up_waits_for_no_store() -> None:
    with ThreadPoolExecutor(1) as pool:
        task = Waiting(1)
        made = Made(pool, task)
        made.assembly.cancel()
        assert made.settled.wait(WAIT_S)
        task.futures[0].set_result(b"")
    assert task.runs == 0


def test_a_task_that_waits_for_a_thread_is_cancelled_as_others_are() -> None:
    going_on = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(going_on.wait, WAIT_S)
        task = Waiting(1)
        made = Made(pool, task)
        task.futures[0].set_result(b"")
        assert not made.settled.wait(0.1)
        made.assembly.cancel()
        assert made.settled.wait(WAIT_S)
        going_on.set()
    assert task.runs == 0


class Asked(Waiting):
    """A task that only the store's side has futures of, as tasks of views are."""

    def __init__(self, futures: list[Future[bytes]]) -> None:
        super().__init__(0)
        self.asked = futures

    def coming(self) -> list[Coming]:
        self.futures, self.asked = self.asked, []
        found, self.futures = super().coming(), []
        return found


def asked_and_let_go(futures: list[Future[bytes]], then: Callable[[Assembly], None]) -> "weakref.ref[Asked]":
    """Make a microbatch of such a task, do something, and forget it; the task, which holds the microbatch's memory."""
    with ThreadPoolExecutor(1) as pool:
        task = Asked(futures)
        made = Made(pool, task)
        then(made.assembly)
        assert made.settled.wait(WAIT_S)
    return weakref.ref(task)


@pytest.mark.usefixtures("no_collection")
def test_a_store_that_hangs_holds_no_memory_of_what_is_given_up() -> None:
    futures = [Future[bytes](), Future[bytes]()]
    task = asked_and_let_go(futures, Assembly.cancel)
    assert task() is None
    for future in futures:
        future.set_result(b"too late")


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("fails", [False, True])
def test_bytes_of_a_store_are_freed_with_their_microbatch(fails: bool) -> None:
    futures = [Future[bytes](), Future[bytes]()]

    def come(_: Assembly) -> None:
        futures[0].set_result(b"came")
        if fails:
            futures[1].set_exception(UnavailableError("503; given up"))
        else:
            futures[1].set_result(b"came, too")

    task, held = asked_and_let_go(futures, come), [weakref.ref(future) for future in futures]
    futures.clear()
    assert task() is None
    assert [one() for one in held] == [None, None]


def test_a_store_that_hangs_holds_no_stream_of_others_up(
    stores: tuple[State, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_client, "READ_S", SILENCE_S)
    state, folder = stores[0], index(write_pairs(tmp_path / "pairs", 32, 4))
    state.put_folder("/bucket/hanging", folder)
    url = index(Path("s3://bucket/hanging"))
    BLOCKS.configure(0)
    jobs = {name: job_data(datasets=[{"name": name}], end={"epochs": 1}) for name in ("hanging", "local")}
    with running({"hanging": url, "local": folder}, decode_threads=THREADS) as server:
        job_ids = {name: server.create(data).job_id for name, data in jobs.items()}
        state.asked.clear()
        state.always = f"wait:{WAIT_S}"
        requests = [pb.StreamMicrobatchesRequest(job_id=job_ids["hanging"], module="vit", rank=rank) for rank in (0, 1)]
        held = [server.stub.StreamMicrobatches(request, timeout=WAIT_S) for request in requests]
        until = time.monotonic() + WAIT_S
        while len(state.asked) < 2 * THREADS and time.monotonic() < until:
            time.sleep(0.01)
        for rank in (0, 1):
            request = pb.StreamMicrobatchesRequest(job_id=job_ids["local"], module="vit", rank=rank)
            assert receive(server.stub.StreamMicrobatches(request, timeout=HANGS_S)).end is not None
        state.always = ""
        for stream in held:
            stream.cancel()
            with pytest.raises(grpc.RpcError, match="ancelled"):
                next(stream)


def test_what_a_store_gave_up_is_served_when_its_blocks_have_come(
    stores: tuple[State, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others read the blocks, once the store answers again: the error of before is nobody's any more."""
    monkeypatch.setattr(retries, "PATIENCE_S", 0.5)
    state, folder = stores[0], index(write_pairs(tmp_path / "pairs", 8, 4))
    state.put_folder("/bucket/laion", folder)
    url = index(Path("s3://bucket/laion"))
    data = job_data(datasets=[{"name": "pairs"}], end={"epochs": 1})

    def images(server: Running) -> list[tuple[bytes, bytes]]:
        request = pb.StreamMicrobatchesRequest(job_id=server.create(data).job_id, module="vit")
        return receive(server.stub.StreamMicrobatches(request, timeout=WAIT_S)).blob()

    with running({"pairs": folder}) as server:
        undisturbed = images(server)
    BLOCKS.forget()
    with running({"pairs": url}) as server:
        state.always = "503"
        with pytest.raises(grpc.RpcError, match="given up"):
            images(server)
        state.always = ""
        dataset = server.catalog.datasets["pairs"]
        keys = [key for shard in range(len(dataset.shards)) for key, _ in dataset.blocks(shard, 0, PARTS)]
        assert keys
        until = time.monotonic() + WAIT_S
        while not all(key in BLOCKS.held for key in keys) and time.monotonic() < until:
            with suppress(ShardReadError):  # it is not asked at once
                for shard in dataset.shards:
                    dataset.read(shard.image(0, 0))
            time.sleep(0.05)
        assert images(server) == undisturbed
