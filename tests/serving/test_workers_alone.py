"""What the processes of one address are told, and when they are started again, without one of them."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import grpc
import pytest
from disttrain.v1 import admin_service_pb2 as pb
from google.protobuf.duration_pb2 import Duration

from dataserver.dataset import Memory
from dataserver.planning.jobspec import parse_yaml
from dataserver.serving import budgets, workers
from dataserver.serving import siblings as siblings_module
from dataserver.serving import supervisor as supervisor_module
from dataserver.serving.config import ServerConfig, Worker, load_config, number_of_workers
from dataserver.serving.places import Places
from dataserver.serving.siblings import Siblings, summed
from dataserver.serving.supervisor import Supervisor
from dataserver.serving.workers import sibling_addresses, worker_configs

MIB = 1 << 20


def configured(**changes: Any) -> ServerConfig:
    return load_config(None, {"datasets": {"x": Path("/x")}, **changes})


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (7, 1), (8, 1), (15, 1), (16, 2), (24, 3), (192, 24)])
def test_a_process_for_every_eight_cores(monkeypatch: pytest.MonkeyPatch, cores: int, count: int) -> None:
    monkeypatch.setattr(budgets, "usable_cores", lambda: cores)
    monkeypatch.setattr(budgets, "usable_memory", lambda: Memory(1 << 40, ""))
    assert number_of_workers("auto") == count


def test_threads_decode_on_the_cores_that_a_server_may_use() -> None:
    code = """
import os
from pathlib import Path
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from dataserver.serving.config import load_config
print(load_config(None, {"datasets": {"x": Path("/x")}}).decode_threads)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("10.1.2.3:50051", ["10.1.2.3:7", "10.1.2.3:9"]),
        ("0.0.0.0:50051", ["127.0.0.1:7", "127.0.0.1:9"]),
        ("[::]:50051", ["[::1]:7", "[::1]:9"]),
        ("[fe80::1]:50051", ["[fe80::1]:7", "[fe80::1]:9"]),
        ("localhost:50051", ["localhost:7", "localhost:9"]),
    ],
)
def test_siblings_are_at_the_other_ports(listen: str, expected: list[str]) -> None:
    config = configured(listen=listen, insecure=True)
    assert sibling_addresses(config) == []
    worker = Worker(number=1, ports=(7, 8, 9), places=0)
    assert sibling_addresses(config.model_copy(update={"worker": worker})) == expected


class Held:
    """A socket that is bound to the port that was asked for, or to one of the test's own."""

    def __init__(self, port: int) -> None:
        self.port = port

    def getsockname(self) -> tuple[str, int]:
        return "h", self.port

    def close(self) -> None:
        pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, bool]]:
    """The sockets that were asked for: host, port and whether others may have the port as well."""
    found: list[tuple[str, int, bool]] = []
    free = iter(range(40_000, 50_000))

    def held(stack: ExitStack, host: str, port: int, *, shared: bool = True) -> Held:
        found.append((host, port, shared))
        return Held(port or next(free))

    monkeypatch.setattr(workers, "_held", held)
    return found


def test_ports_of_processes_follow_that_of_the_address(asked: list[tuple[str, int, bool]]) -> None:
    config = configured(listen="127.0.0.1:6000", metrics_listen="127.0.0.1:7000")
    with worker_configs(config, 3) as found:
        assert {c.listen for c in found} == {"127.0.0.1:6000"}
        assert [c.worker.number for c in found if c.worker] == [0, 1, 2]
        assert {c.worker.ports for c in found if c.worker} == {(6001, 6002, 6003)}
        assert [c.metrics_listen for c in found] == ["127.0.0.1:7000", None, None]
    here = "127.0.0.1"
    assert asked == [
        (here, 6000, False),
        (here, 6000, True),
        (here, 6001, True),
        (here, 6002, True),
        (here, 6003, True),
    ]


def test_free_ports_are_found_once_for_all(asked: list[tuple[str, int, bool]]) -> None:
    with worker_configs(configured(listen="127.0.0.1:0", metrics_listen="localhost:0"), 2) as found:
        assert [c.listen for c in found] == ["127.0.0.1:40000"] * 2
        assert {c.worker.ports for c in found if c.worker} == {(40001, 40002)}
        assert [c.metrics_listen for c in found] == ["localhost:40003", None]
    assert asked == [("127.0.0.1", 0, True)] * 3 + [("localhost", 0, True)]


@pytest.mark.usefixtures("asked")
def test_memory_and_threads_are_divided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {"datasets": {"x": Path("d")}, "index_dirs": {"x": Path("i")}, "quarantines": {"x": Path("q")}}
    config = configured(
        **paths,
        tokenizers={"t": Path("t")},
        cache_dir=Path("c"),
        prefetch_bytes=1000 * MIB,
        job_bytes=300 * MIB,
        decode_threads=7,
        workers=3,
    )
    with worker_configs(config, 3) as found:
        for c in found:
            assert (c.prefetch_bytes, c.job_bytes, c.decode_threads, c.workers) == (1000 * MIB // 3, 100 * MIB, 3, 1)
            assert (c.datasets, c.index_dirs) == ({"x": tmp_path / "d"}, {"x": tmp_path / "i"})
            assert (c.quarantines, c.tokenizers) == ({"x": tmp_path / "q"}, {"t": tmp_path / "t"})
            assert c.cache_dir == tmp_path / "c"
            assert c.metrics_listen is None
    with worker_configs(config.model_copy(update={"cache_dir": None}), 5) as found:
        assert [(c.job_bytes, c.decode_threads, c.cache_dir) for c in found] == [(64 * MIB, 2, None)] * 5


def test_the_file_of_places_is_closed_with_the_ports() -> None:
    with worker_configs(configured(listen="127.0.0.1:0"), 2) as (first, second):
        assert first.worker is not None
        assert second.worker is not None
        descriptor = first.worker.places
        assert second.worker.places == descriptor
        os.fstat(descriptor)
        ports = (int(first.listen.rpartition(":")[2]), *first.worker.ports)
        assert len(set(ports)) == 3
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    for port in ports:
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))


def test_places_of_one_process() -> None:
    places = Places(2)
    assert [places.take(), places.take(), places.take()] == [1, 0, None]
    places.give(1)
    assert [places.take(), places.take()] == [1, None]


class Turn:
    """A condition that nobody waits for: it tells how long it would have been."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.told = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        self.told += 1

    def wait_for(self, _: Callable[[], bool], seconds: float) -> None:
        self.pauses.append(seconds)


class Lines:
    """What a process prints."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def __enter__(self) -> list[str]:
        return self._lines

    def __exit__(self, *_: object) -> None:
        pass


class Process:
    """Prints lines, runs for so long, and ends."""

    def __init__(self, world: "World", lines: list[str], seconds: float, code: int) -> None:
        self._world, self._seconds, self._code = world, seconds, code
        self.stdout = Lines(lines)
        self.signals: list[int] = []

    def wait(self) -> int:
        self._world.now += self._seconds
        return self._code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


class World:
    """Processes of a script, one after the other, each by its keeper, all in the test's thread."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, script: Sequence[tuple[list[str], float, int] | OSError]
    ) -> None:
        self.now = 0.0
        self.script = iter(script)
        self.turn = Turn()
        self.events: list[str] = []
        self.spawned = 0
        monkeypatch.setattr(supervisor_module, "monotonic", lambda: self.now)
        inline = SimpleNamespace(Condition=lambda: self.turn, Thread=self.thread)
        monkeypatch.setattr(supervisor_module, "threading", inline)
        monkeypatch.setattr(Supervisor, "_spawn", lambda keeper, number, _: self.spawn(keeper, number))

    def thread(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> Any:  # noqa: ARG002
        return SimpleNamespace(start=lambda: target(*args), join=bool)

    def spawn(self, keeper: Supervisor, number: int) -> Process | None:
        found = next(self.script, None)
        if keeper._ending or found is None:
            return None
        if isinstance(found, OSError):
            raise found
        self.spawned += 1
        process = Process(self, *found)
        keeper._running[number] = process  # type: ignore[assignment]
        return process

    def supervise(self, count: int = 1) -> Supervisor:
        configs = [configured()] * count
        return Supervisor(configs, lambda: self.events.append("serving"), lambda: self.events.append("ended"))


READY = ["listening on 127.0.0.1:1\n"]


def test_pauses_double_up_to_half_a_minute_and_begin_anew_after_a_steady_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = [(READY, 5.0, 1), *[([], 59.0, -9)] * 6, ([], 60.0, 1), ([], 60.5, 2), ([], 5.0, 1), ([], 5.0, 0)]
    world = World(monkeypatch, runs)
    found = world.supervise()
    assert world.turn.pauses == [1, 2, 4, 8, 16, 30, 30, 30, 1, 2]
    assert world.events == ["serving", "ended"]
    assert not found.failed
    assert caplog.messages[0] == "worker 0 ended with exit code 1; it is started again in 1 s"
    assert caplog.messages[1] == "worker 0 was killed by SIGKILL; it is started again in 2 s"
    assert caplog.messages[8] == "worker 0 ended with exit code 2; it is started again in 1 s"
    assert world.spawned == 11, "one that ends well ends all"


def test_a_process_that_ends_before_all_serve_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, [(["some words\n"], 1.0, 1), (READY, 1.0, 0)])
    found = world.supervise()
    assert found.failed
    assert (world.events, world.turn.pauses, world.spawned) == (["ended"], [], 1)


def test_a_process_that_the_system_does_not_start_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = OSError(11, "Resource temporarily unavailable")
    world = World(monkeypatch, [(READY, 5.0, 1), refused, refused, (READY, 5.0, 0)])
    assert not world.supervise().failed
    assert world.turn.pauses == [1, 2, 4]
    assert caplog.messages[1] == (
        "worker 0 cannot be started ([Errno 11] Resource temporarily unavailable); it is started again in 2 s"
    )
    first = World(monkeypatch, [refused, (READY, 5.0, 0)])
    assert first.supervise().failed, "before all serve it ends all"
    assert first.spawned == 0


def test_all_serve_when_the_last_one_does_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, [([*READY, "metrics on x\n", *READY], 1.0, -15)])
    keeper = world.supervise()
    assert world.events == ["serving", "ended"]
    assert world.turn.pauses == [1]
    process: Any = Process(world, READY, 0.0, 0)
    keeper._starting = {1, 2}
    keeper._follow(0, process)
    keeper._follow(1, process)
    assert world.events == ["serving", "ended"]
    keeper._follow(2, process)
    assert world.events == ["serving", "ended", "serving"]


def test_the_end_reaches_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, [])
    keeper = world.supervise()
    processes: list[Any] = [Process(world, [], 0.0, 0) for _ in range(2)]
    keeper._running = dict(enumerate(processes))
    keeper._end_others()
    assert [p.signals for p in processes] == [[signal.SIGTERM]] * 2
    keeper._end_others()
    assert [p.signals for p in processes] == [[signal.SIGTERM]] * 2, "they are ending"
    told = world.turn.told
    keeper.end()
    assert world.turn.told == told + 1, "who pauses before a process is started again"
    assert [p.signals for p in processes] == [[signal.SIGTERM] * 2] * 2, "at once, the second time"


def test_a_process_is_told_its_configuration_and_where_the_places_are(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, [])
    keeper = world.supervise()
    monkeypatch.undo()
    started: list[tuple[list[str], dict[str, Any]]] = []
    written: list[str] = []

    class Stdin:
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def write(self, text: str) -> None:
            written.append(text)
            if len(written) == 3:
                raise BrokenPipeError

    def popen(line: list[str], **options: Any) -> Any:
        started.append((line, options))
        return SimpleNamespace(stdin=Stdin(), stdout=None)

    monkeypatch.setattr(subprocess, "Popen", popen)
    alone = configured(cache_dir=Path("/gr\udcfc"))  # of a name that is not UTF-8
    one_of_two = alone.model_copy(update={"log_format": "json", "worker": Worker(number=1, ports=(7, 8), places=5)})
    for config in (alone, one_of_two, alone):
        assert keeper._spawn(4, config) is keeper._running[4]
    assert [options["pass_fds"] for _, options in started] == [[], [5], []]
    assert all(options["start_new_session"] and options["text"] for _, options in started)
    shared = ["-m", "dataserver", "serve", "--config", "/dev/stdin", "--log-format"]
    assert started[0][0][1:] == [*shared, "text"]
    assert started[1][0][1:] == [*shared, "json"]
    told = [load_config(None, parse_yaml(text.encode())) for text in written]
    assert told == [alone, one_of_two, alone], "one that has ended is no error"
    keeper._ending = True
    assert keeper._spawn(4, alone) is None
    assert len(started) == 3


@pytest.fixture
def siblings() -> Iterator[Siblings]:
    found = Siblings(["127.0.0.1:1", "127.0.0.1:2"])
    yield found
    found.close()


class Lost(grpc.RpcError):
    def details(self) -> str:
        return "refused"


def answering(siblings: Siblings, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> list[tuple[Any, float]]:
    """Let the siblings answer one after the other; None is none. What they were asked, and for how long."""
    asked: list[tuple[Any, float]] = []
    left = iter(answers)

    def future(request: Any, timeout: float) -> Any:
        asked.append((request, timeout))
        answer = next(left)

        def result() -> Any:
            if answer is None:
                raise Lost
            return answer

        return SimpleNamespace(result=result)

    method = SimpleNamespace(future=future)
    stub = SimpleNamespace(GetMetrics=method, Drain=method)
    monkeypatch.setattr(siblings_module, "AdminServiceStub", lambda _: stub)
    return asked


def test_siblings_that_do_not_answer_drain_nothing(
    siblings: Siblings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    asked = answering(siblings, monkeypatch, None, "one", None, "two", "three", "four")
    request: Any = "request"
    assert [siblings.drain(request) for _ in range(3)] == [["one"], ["two"], ["three", "four"]]
    assert asked == [("request", 1.0)] * 6
    assert caplog.messages == [
        "the process of this server at 127.0.0.1:1 does not answer: refused",
        "the process of this server at 127.0.0.1:1 answers again",
    ]


def test_numbers_of_a_sibling_that_is_late_are_those_of_before(
    siblings: Siblings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no counter falls, and comes back."""
    now = [100.0]
    monkeypatch.setattr(siblings_module, "monotonic", lambda: now[0])

    def numbers(seconds: int, images: int) -> pb.GetMetricsResponse:
        return pb.GetMetricsResponse(uptime=Duration(seconds=seconds), decoded_images=images)

    asked = answering(
        siblings, monkeypatch, None, numbers(9, 5), numbers(1, 7), None, None, None, numbers(2, 0), numbers(16, 8)
    )
    found = []
    for _ in range(4):
        found.append(sorted((a.uptime.seconds, a.decoded_images) for a in siblings.metrics()))
        now[0] += 2
    assert found == [[(9, 5)], [(1, 7), (11, 5)], [(3, 7), (13, 5)], [(2, 7), (16, 8)]]
    assert all(request.this_process for request, _ in asked)


def counted(seconds: int, number: int, *plans: int) -> pb.GetMetricsResponse:
    """What a process has counted, in fields of each kind, and numbers of the moment."""
    found = pb.GetMetricsResponse(
        uptime=Duration(seconds=seconds),
        sent_bytes=number,
        planning_time=Duration(seconds=number),
        waits=pb.StageWaits(memory=Duration(seconds=number)),
        plans_by_source=pb.PlanSources(late=number),
        plan_times=[pb.PlanTimes(plans=n) for n in plans],
        open_streams=number,
        kept=pb.KeptBytes(jobs=number),
    )
    found.ranks.add(rank=number)
    return found


@pytest.mark.parametrize(
    "second",
    [
        counted(3, 9, 4, 6),  # began later, whatever it has counted
        counted(99, 3, 4, 6),
        counted(99, 9, 4, 4),
        counted(99, 9, 4),
    ],
)
def test_counters_of_a_sibling_that_ended_stay_in_the_sums(
    monkeypatch: pytest.MonkeyPatch, second: pb.GetMetricsResponse
) -> None:
    with closing(Siblings(["127.0.0.1:1"])) as one:
        answering(one, monkeypatch, counted(10, 4, 4, 5), counted(11, 5, 4, 5), second, second)
        assert one.metrics()[0].sent_bytes == 4
        assert one.metrics()[0].sent_bytes == 5
        for _ in range(2):
            (found,) = one.metrics()
            number = second.sent_bytes
            assert (found.sent_bytes, found.plans_by_source.late) == (5 + number,) * 2
            assert (found.planning_time.seconds, found.waits.memory.seconds) == (5 + number,) * 2
            assert [entry.plans for entry in found.plan_times][:2] == [
                8,
                5 + sum(t.plans for t in second.plan_times[1:]),
            ]
            assert (found.open_streams, found.kept.jobs, [r.rank for r in found.ranks]) == (number, number, [number])
            assert found.uptime.seconds == second.uptime.seconds


def test_numbers_that_several_ask_for_at_a_time_are_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers may come in another order."""
    ticks = itertools.count(1)

    def future(request: Any, timeout: float) -> Any:
        tick = next(ticks)

        def result() -> pb.GetMetricsResponse:
            time.sleep(tick % 5 / 1000)
            return counted(tick, tick, tick)

        return SimpleNamespace(result=result)

    stub = SimpleNamespace(GetMetrics=SimpleNamespace(future=future))
    monkeypatch.setattr(siblings_module, "AdminServiceStub", lambda _: stub)
    with closing(Siblings(["127.0.0.1:1"])) as one, ThreadPoolExecutor(8) as pool:
        found = [answers[0].sent_bytes for answers in pool.map(lambda _: one.metrics(), range(200))]
    assert 10 < max(found) < next(ticks) <= 201


def test_a_process_that_is_started_again_counts_what_its_siblings_did_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums begin at zero: where they begin at what the others have, all of that would pass for new."""
    with closing(Siblings(["127.0.0.1:1"], again=True)) as one:
        answering(one, monkeypatch, counted(10, 4, 4), counted(11, 6, 9), counted(2, 3, 1), counted(4, 4, 2))
        found = [one.metrics()[0] for _ in range(4)]
    assert [f.sent_bytes for f in found] == [0, 2, 2 + 3, 2 + 4]
    assert [f.planning_time.seconds for f in found] == [0, 2, 5, 6]
    assert [f.plan_times[0].plans for f in found] == [0, 5, 6, 7]
    assert [f.open_streams for f in found] == [4, 6, 3, 4]


def test_sums_of_buckets_of_unequal_number_and_of_ranks_by_name() -> None:
    one, other = pb.GetMetricsResponse(), pb.GetMetricsResponse()
    one.plan_times.add(plans=3)
    for plans in (4, 5, 6):
        other.plan_times.add(plans=plans)
    for answer, ranks in ((one, [("b", "m", 0), ("a", "n", 1)]), (other, [("a", "n", 0), ("a", "m", 2)])):
        for job, module, rank in ranks:
            answer.ranks.add(job=job, module=module, rank=rank)
    whole = summed([one, other])
    assert [entry.plans for entry in whole.plan_times] == [7, 5, 6]
    assert [(r.job, r.module, r.rank) for r in whole.ranks] == [
        ("a", "m", 2),
        ("a", "n", 0),
        ("a", "n", 1),
        ("b", "m", 0),
    ]
    assert summed([]).uptime.ToNanoseconds() == 0
