"""One stream whose threads are the test's own: what it prepares when, what it holds, and how it ends."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1 import errors_pb2
from disttrain.v1.data_service_pb2 import EndOfStream
from serving.data_connection import connected
from serving.harness import TIMEOUT_S

from dataserver.dataset import ShardReadError
from dataserver.serving.errors import DataServiceError
from dataserver.serving.metrics import Metrics
from dataserver.serving.stream import assembly
from dataserver.serving.stream.assembly import Assembly, with_retries
from dataserver.serving.stream.preparing import MAX_AHEAD
from dataserver.serving.stream.shared import Shared
from dataserver.serving.stream.stream import MicrobatchStream, StreamOptions
from dataserver.serving.stream_memory import BufferPool, ByteBudget
from dataserver.serving.transport.direct import FIELD
from dataserver.serving.transport.direct_listener import DirectListener
from dataserver.serving.transport.grpc import GrpcTransport
from dataserver.serving.transport.interface import EncodedMicrobatch, Memory
from dataserver.serving.transport.shared_memory_listener import SharedMemoryListener
from dataserver.tracing import opened
from trainclient.stream.shared_memory import MappedBlocks

SIZE = 1 << 16
"""Bytes of a microbatch, and of its buffer."""


class Inline:
    """Runs at once what is submitted."""

    groups: tuple[str, ...] = ()

    def queue(self, group: str) -> "Inline":
        self.groups += (group,)
        return self

    def submit(self, task: Callable[..., None], *arguments: Any) -> None:
        task(*arguments)


class Task:
    """What reads nothing of a store."""

    def __init__(self, call: Callable[[], int]) -> None:
        self.call = call

    def __call__(self) -> int:
        return self.call()

    def coming(self) -> list[Any]:
        return []


class Source:
    """Steps of three microbatches, and notes of what was made."""

    job_id = "job"
    module = "m"

    def __init__(self, num_steps: int = 5, size: int = SIZE, broken: tuple[int, int] | None = None) -> None:
        self.num_steps, self.size, self.broken = num_steps, size, broken
        self.plans: list[int] = []
        self.prepared: list[tuple[int, int]] = []

    def plan(self, step: int, _cancelled: Any) -> Any:
        self.plans.append(step)
        if (step, -1) == self.broken:
            raise DataServiceError(errors_pb2.ERROR_REASON_SAMPLE_TOO_LARGE, "no plan")
        return SimpleNamespace(step=step, num_microbatches=3)

    def specify(self, plan: Any, microbatch: int) -> Any:
        return SimpleNamespace(plan=plan, view=SimpleNamespace(microbatch=microbatch), num_bytes=self.size)

    def prepare(self, spec: Any, buffer: Any) -> Any:
        where = spec.plan.step, spec.view.microbatch
        if where == self.broken:
            raise DataServiceError(errors_pb2.ERROR_REASON_SAMPLE_TOO_LARGE, "no view")
        self.prepared.append(where)
        buffer[:] = 10 * where[0] + where[1]
        return SimpleNamespace(tasks=[], finish=lambda: None, buffer=buffer, num_images=0, num_invalid=0)

    def encode(self, _spec: Any, prepared: Any, _checksummed: bool) -> EncodedMicrobatch:
        return EncodedMicrobatch(b"header", prepared.buffer)


class OneStream:
    """What streams share, one stream, and its messages."""

    def __init__(
        self, source: Source, budget: int = 1 << 30, start: tuple[int, int] = (0, 0), ahead_bytes: int = 1 << 30
    ) -> None:
        self.closed: list[MicrobatchStream] = []
        memory = ByteBudget(budget)
        self.shared = Shared(
            stream_bytes=SIZE,
            ahead_bytes=ahead_bytes,
            budget=memory,
            buffers=BufferPool(memory),
            planning=Inline(),  # type: ignore[arg-type]
            laying_out=Inline(),  # type: ignore[arg-type]
            decoding=Inline(),  # type: ignore[arg-type]
            shared_memory=SharedMemoryListener(wanted=True),
            direct=DirectListener(),
            draining=threading.Event(),
            metrics=Metrics(),
        )
        self.source = source
        self.stream = MicrobatchStream(self.shared, source, *start, lambda: None, self.closed.append)  # type: ignore[arg-type]
        self.stream.start()
        self.messages = self.stream.messages()

    def read(self) -> int:
        """Take one microbatch; the number that fills it."""
        assert next(self.messages) == b"header"
        chunk = pb.StreamMicrobatchesResponse.FromString(next(self.messages)).chunk
        assert len(chunk) == SIZE
        assert len(set(chunk)) == 1
        return chunk[0]

    def end(self) -> tuple[int, int, int]:
        """The last message."""
        (message,) = self.messages
        found = pb.StreamMicrobatchesResponse.FromString(message).end
        assert self.closed == [self.stream]
        assert self.shared.budget.used == 0
        return found.reason, found.next_step, found.next_microbatch


def memory() -> Memory:
    """Memory for one microbatch, as streams get it."""
    budget = ByteBudget(0)
    found = GrpcTransport(budget.open(), BufferPool(budget)).memory(SIZE)
    assert found is not None
    return found


ALL = [(step, microbatch) for step in range(5) for microbatch in range(3)]
NUMBERS = [10 * step + microbatch for step, microbatch in ALL]


def test_a_stream_has_its_turns_at_laying_out_and_decoding_with_those_of_its_job() -> None:
    shared: Any = OneStream(Source()).shared
    assert (shared.laying_out.groups, shared.decoding.groups) == (("job",), ("job",))


@pytest.mark.parametrize(
    ("budget", "ahead_bytes", "ahead"),
    [
        (0, 99 * SIZE, 1),
        (SIZE - 1, 99 * SIZE, 1),
        (SIZE, 99 * SIZE, 2),
        (3 * SIZE, 99 * SIZE, 4),
        (7 * SIZE, 99 * SIZE, 8),
        (99 * SIZE, 99 * SIZE, 8),
        (99 * SIZE, 7 * SIZE + 1, 8),
        (99 * SIZE, 2 * SIZE + 1, 3),
        (99 * SIZE, 2 * SIZE, 2),
        (99 * SIZE, 1, 2),
    ],
)
def test_a_stream_prepares_as_far_ahead_as_its_memory_and_its_limits_allow(
    budget: int, ahead_bytes: int, ahead: int
) -> None:
    """One microbatch lies in the stream's own memory, the others in the budget. The one in hand keeps its memory."""
    one = OneStream(Source(), budget, ahead_bytes=ahead_bytes)
    numbers = []
    for taken in range(15):
        made = max(0, taken - 1) + ahead
        assert one.source.prepared == ALL[:made]
        assert one.shared.budget.used == (ahead - 1) * SIZE or made > 15
        numbers.append(one.read())
    assert numbers == NUMBERS
    assert one.source.plans == [0, 1, 2, 3, 4]
    assert one.end() == (EndOfStream.REASON_END_OF_JOB, 5, 0)
    assert one.shared.buffers.free_bytes == max(SIZE, min(budget, ahead * SIZE))
    assert MAX_AHEAD == 8


def test_what_is_refused_takes_no_buffer() -> None:
    one, taken = OneStream(Source(), budget=2 * SIZE), list[int]()
    take = one.shared.buffers.take
    one.shared.buffers.take = lambda num_bytes: taken.append(num_bytes) or take(num_bytes)  # type: ignore[method-assign, func-returns-value]
    for number in range(5):
        assert one.read() == NUMBERS[number]
        assert len(taken) == number, "one for each that was released"


def test_what_was_granted_goes_back_where_the_machine_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, asked = BufferPool.take, list[int]()

    def take(pool: BufferPool, num_bytes: int) -> Any:
        asked.append(num_bytes)
        if len(asked) > 1:  # the first one lies in the stream's own memory
            raise MemoryError
        return whole(pool, num_bytes)

    monkeypatch.setattr(BufferPool, "take", take)
    one = OneStream(Source())
    assert one.read() == NUMBERS[0]
    with pytest.raises(DataServiceError, match="MemoryError"):
        one.read()
    assert one.shared.budget.used == 0


@pytest.mark.parametrize("start", [(0, 2), (3, 1), (4, 2), (5, 0)])
def test_a_stream_begins_where_it_is_asked_to(start: tuple[int, int]) -> None:
    one = OneStream(Source(), start=start)
    assert [one.read() for _ in range(len(NUMBERS[3 * start[0] + start[1] :]))] == NUMBERS[3 * start[0] + start[1] :]
    assert one.end() == (EndOfStream.REASON_END_OF_JOB, 5, 0)


@pytest.mark.parametrize(
    ("source", "start", "count", "message"),
    [
        (Source(), (1, 3), 0, "microbatch 3 of step 1 was asked for; the step has 3"),
        (Source(broken=(1, -1)), (0, 0), 3, "no plan"),
        (Source(broken=(1, 1)), (0, 0), 4, "no view"),
        (
            Source(size=SIZE + 1),
            (0, 0),
            0,
            f"microbatch 0 of step 0 has {SIZE + 1} bytes for module m; a stream of this server may take {SIZE}: lower "
            "execution.microbatch or the sizes of images (stream.sizing), or raise the server's stream_bytes",
        ),
    ],
)
def test_what_cannot_be_made_is_said_after_all_that_could(
    source: Source, start: tuple[int, int], count: int, message: str
) -> None:
    one = OneStream(source, start=start)
    assert [one.read() for _ in range(count)] == NUMBERS[:count]
    with pytest.raises(DataServiceError) as caught:
        next(one.messages)
    assert str(caught.value) == message
    assert one.closed == [one.stream]
    assert one.shared.budget.used == 0


def test_a_drained_stream_ends_after_the_microbatch_in_hand() -> None:
    one = OneStream(Source())
    assert next(one.messages) == b"header"
    one.shared.draining.set()
    one.stream.wake()
    next(one.messages)
    assert one.end() == (EndOfStream.REASON_DRAINING, 0, 1)
    finished = OneStream(Source(1))
    assert [finished.read() for _ in range(3)] == [0, 1, 2]
    finished.shared.draining.set()
    assert finished.end() == (EndOfStream.REASON_END_OF_JOB, 1, 0)


def test_a_closed_stream_gives_all_back_and_says_nothing_more() -> None:
    one = OneStream(Source(), 3 * SIZE)
    assert one.read() == 0
    one.stream.close()
    one.stream.close()
    assert list(one.messages) == []
    assert (one.shared.budget.used, one.shared.buffers.free_bytes) == (0, 3 * SIZE)
    assert one.closed == [one.stream] * 3
    second = one.shared.budget.open()
    assert second.take(1)
    assert second.take(3 * SIZE - 1), "the closed stream shares no more"


def test_shared_memory_takes_the_budget_of_idle_buffers() -> None:
    one = OneStream(Source(), 8 * SIZE)
    one.stream.close()
    idle = one.shared.buffers.free_bytes
    assert idle >= 7 * SIZE
    mapped = MappedBlocks.of(one.shared.shared_memory.name, 1 << 30, stays=True)
    assert mapped is not None
    options = StreamOptions(memory_token=mapped.token)
    stream = MicrobatchStream(one.shared, Source(), 0, 0, lambda: None, one.closed.append, options)  # type: ignore[arg-type]
    stream.start()
    used = one.shared.budget.used
    assert used >= 4 * SIZE
    assert used + one.shared.buffers.free_bytes <= one.shared.budget.total
    stream.close()
    mapped.close()


def test_a_stream_is_idle_when_a_message_was_not_taken_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("dataserver.serving.stream.handing_out.monotonic", lambda: now[0])
    one = OneStream(Source(), 3 * SIZE)
    now[0] = 900.0
    assert not one.stream.end_if_idle(10), "nothing was offered yet"
    assert next(one.messages) == b"header"
    now[0] = 909.75
    assert not one.stream.end_if_idle(10)
    next(one.messages)
    now[0] = 919.5
    assert not one.stream.end_if_idle(10), "the clock began again"
    now[0] = 919.75
    assert one.stream.end_if_idle(10)
    assert not one.stream.end_if_idle(10)
    assert (one.shared.budget.used, one.shared.buffers.free_bytes) == (0, 3 * SIZE)
    assert one.end() == (EndOfStream.REASON_IDLE, 0, 1)
    one = OneStream(Source(), 3 * SIZE)
    assert next(one.messages) == b"header"
    now[0] += 10
    assert one.stream.end_if_idle(10)
    assert one.end() == (EndOfStream.REASON_IDLE, 0, 0)


def test_a_client_that_takes_neither_its_offer_nor_its_restart_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The offer of a data connection, and the message that says where the stream begins again."""
    now = [100.0]
    monkeypatch.setattr("dataserver.serving.stream.handing_out.monotonic", lambda: now[0])
    monkeypatch.setattr("dataserver.serving.stream.handing_out.CONNECT_S", TIMEOUT_S)
    one = OneStream(Source(), 8 * SIZE)
    one.stream.close()
    one.shared.direct.listen("127.0.0.1", 0)
    for restarts in (False, True):
        one.closed.clear()
        options = StreamOptions(direct=True)
        one.stream = MicrobatchStream(one.shared, Source(), 0, 0, lambda: None, one.closed.append, options)  # type: ignore[arg-type]
        one.stream.start()
        one.messages = one.stream.messages()
        assert not one.stream.end_if_idle(10), "nothing was offered yet"
        offer = pb.StreamMicrobatchesResponse.FromString(next(one.messages)).offer
        assert offer.token == one.stream.direct_token
        if restarts:
            with connected(offer):
                monkeypatch.setattr(one.stream._direct, "write", lambda *_: False)  # its connection is lost
                assert next(one.messages) == b"header" + FIELD
                assert one.stream.end_direct(0, 0)
                message = pb.StreamMicrobatchesResponse.FromString(next(one.messages))
            assert message.WhichOneof("message") == "restart"
        assert one.shared.budget.used > 0
        now[0] += 9.75
        assert not one.stream.end_if_idle(10)
        now[0] += 0.25
        assert one.stream.end_if_idle(10)
        assert one.shared.budget.used == 0
        assert one.stream.direct_token is None
        assert one.end() == (EndOfStream.REASON_IDLE, 0, 0)
    one.shared.direct.close()


class Stop:
    """Notes waits instead of waiting."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return False

    def is_set(self) -> bool:
        return False


def test_storage_is_read_four_times_with_doubling_waits() -> None:
    stop, reads = Stop(), []

    def read() -> None:
        reads.append(1)
        raise ShardReadError("gone")

    with pytest.raises(ShardReadError):
        with_retries(read, stop, Metrics())  # type: ignore[arg-type]
    assert (len(reads), stop.waits) == (4, [0.05, 0.1, 0.2])
    assert (assembly.READ_ATTEMPTS, assembly.READ_BACKOFF_S) == (4, 0.05)


def test_a_cancelled_assembly_is_settled_without_its_tasks() -> None:
    """Its tasks wait for threads that others keep busy; its buffer is free at once all the same."""
    waiting: list[Future[int]] = []

    class Busy:
        def submit(self, _run: Any, _task: Any) -> Future[int]:
            waiting.append(Future())
            return waiting[-1]

    source, settled = Source(), list[Assembly]()
    prepared = SimpleNamespace(tasks=[Task(lambda: 1)] * 3, finish=lambda: None, num_images=3, num_invalid=0)
    source.prepare = lambda *_: prepared  # type: ignore[method-assign]
    made = Assembly(
        source.specify(source.plan(0, None), 0), memory(), Metrics(), settled.append, opened(None, "prepare")
    )
    made.start(source, Busy())  # type: ignore[arg-type]
    assert (len(waiting), settled) == (3, [])
    made.cancel()
    assert all(future.cancelled() for future in waiting)
    assert settled == [made]
    assert made.encoded is None
    assert made.error is None


def test_an_assembly_that_is_cancelled_before_it_begins_tokenizes_nothing() -> None:
    source, settled = Source(), list[Assembly]()
    spec = source.specify(source.plan(0, None), 0)
    made = Assembly(spec, memory(), Metrics(), settled.append, opened(None, "prepare"))
    made.cancel()
    made.start(source, Inline())  # type: ignore[arg-type]
    assert settled == [made]
    assert source.prepared == []


def test_an_assembly_that_failed_begins_no_other_task() -> None:
    source, settled, begun = Source(), list[Assembly](), list[int]()

    def task(number: int) -> int:
        begun.append(number)
        raise ValueError(f"no image {number}")

    tasks = [Task(partial(task, number)) for number in range(3)]
    prepared = SimpleNamespace(tasks=tasks, finish=lambda: None, buffer=b"", num_images=3, num_invalid=0)
    source.prepare = lambda *_: prepared  # type: ignore[method-assign]
    made = Assembly(
        source.specify(source.plan(0, None), 0), memory(), Metrics(), settled.append, opened(None, "prepare")
    )
    with ThreadPoolExecutor(1) as pool:
        made.start(source, pool)  # type: ignore[arg-type]
    assert begun == [0]
    assert settled == [made]
    assert made.encoded is None
    assert str(made.error) == "no image 0"
