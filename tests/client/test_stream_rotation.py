"""A rotation step by step on a clock of its own: which server comes next, how long it pauses, and when it gives up."""

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import pytest
from disttrain.v1.errors_pb2 import ERROR_ACTION_ANOTHER_SERVER, ERROR_ACTION_GIVE_UP, ERROR_ACTION_RETRY, ErrorAction

from trainclient.stream import rotation
from trainclient.stream.endpoint import CallGuard, Endpoint, Timeouts, _channel_options, parse_addresses
from trainclient.stream.errors import (
    AddressError,
    ClientError,
    ClosedError,
    CutStreamError,
    DataServiceError,
    FleetError,
)
from trainclient.stream.handoff import Handoff
from trainclient.stream.rotation import Rotation


@dataclass(frozen=True)
class Address:
    address: str


@dataclass
class Guard:
    """Pauses by moving the clock on."""

    now: float = 1000.0
    pauses: list[float] = field(default_factory=list)

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


class Trio:
    """A rotation over some servers and what it shares."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 3, **timeouts: float) -> None:
        self.endpoints = tuple(Address(name) for name in "abcdefgh"[:count])
        self.timeouts = Timeouts(**timeouts)
        self.key = "job/llm/0"
        self.speaks = True
        self.current = 0
        self.reached = True
        self.refusals: dict[str, str] = {}
        self.forgotten: list[str] = []
        self.guard = Guard()
        monkeypatch.setattr("time.monotonic", lambda: self.guard.now)

    def forget(self, endpoint: Address) -> None:
        self.forgotten.append(endpoint.address)

    def rotation(self) -> Rotation:
        return Rotation(self, self.guard)  # type: ignore[arg-type]

    def pause(self, rounds: int) -> float:
        jitter = int.from_bytes(hashlib.sha256(f"job/llm/0/{rounds}".encode()).digest()[:8], "little") / 2**64
        return min(5.0, 0.1 * 2**rounds) * (1 + jitter) / 2


def error(text: str, action: "ErrorAction.ValueType" = ERROR_ACTION_RETRY) -> ClientError:
    found = ClientError(text)
    found.action = action
    return found


def refusal(text: str) -> ClientError:
    return error(text, ERROR_ACTION_ANOTHER_SERVER)


def raised(action: Callable[[], object]) -> str:
    with pytest.raises(FleetError) as caught:
        action()
    return str(caught.value)


def test_all_servers_are_tried_in_turn_with_doubling_pauses_between_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Trio(monkeypatch, give_up=10_000)
    fleet.current = 1
    way = fleet.rotation()
    asked = []
    for _ in range(40):
        asked.append(way.endpoint.address)
        way.failed(error("lost"))
    assert asked == (["b", "c", "a"] * 14)[:40]
    assert fleet.forgotten == asked
    assert fleet.guard.pauses == pytest.approx([fleet.pause(rounds) for rounds in range(1, 14)], rel=1e-12)
    assert [fleet.pause(rounds) <= 5 for rounds in (5, 6, 7)] == [True] * 3
    way.failed(error("lost"))
    way.succeeded()
    assert (fleet.current, way.endpoint.address) == (0, "a")
    del fleet.guard.pauses[:]
    for _ in range(3):
        way.failed(error("lost"))
    assert fleet.guard.pauses == pytest.approx([fleet.pause(1)], rel=1e-12)
    assert rotation.word("x") == int.from_bytes(hashlib.sha256(b"x").digest()[:8], "little")
    assert (rotation.FIRST_PAUSE_S, rotation.LONGEST_PAUSE_S, rotation.REPORT_EVERY_S) == (0.1, 5.0, 5.0)


@pytest.mark.parametrize("reached", [True, False])
def test_patience_ends_at_its_limit_and_pauses_no_longer(monkeypatch: pytest.MonkeyPatch, reached: bool) -> None:
    """After a loss it counts from the first failure, before any answer from the beginning."""
    fleet = Trio(monkeypatch, 2, give_up=30.0, first_answer=40.0)
    fleet.reached = reached
    way = fleet.rotation()
    fleet.guard.now += 10
    way.failed(error("lost a"))
    fleet.guard.now += 29.96
    way.failed(error("lost b"))
    assert fleet.guard.pauses == pytest.approx([0.04], rel=1e-6)
    problem = "no server could go on for 30 s" if reached else "no server could be reached for 40 s"
    hint = "" if reached else "; check the addresses, and that `dataserver serve` runs there"
    assert raised(lambda: way.failed(error("again"))) == f"{problem}{hint}: a: again; b: lost b"


def computing(done: int) -> ClientError:
    text = f"the statistics of {done} of 9 shards are computed"
    return DataServiceError("a", grpc.StatusCode.UNAVAILABLE, "STATISTICS_PENDING", text, ERROR_ACTION_RETRY)


def test_servers_that_compute_statistics_have_the_time_that_jobs_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Trio(monkeypatch, 1, give_up=30.0, register=500.0)
    way = fleet.rotation()
    for done in range(9):
        way.failed(computing(done))
        fleet.guard.now += 50
    assert "a: answered STATISTICS_PENDING: the statistics of 7 of 9 shards are computed" in caplog.text
    assert caplog.text.count("going to the next server") == 1, "said once, and every five seconds how far it is"
    assert "no server could go on for 500 s" in raised(lambda: [way.failed(computing(9)) for _ in range(20)])
    way.succeeded()
    way.failed(error("lost"))
    fleet.guard.now += 31
    assert "no server could go on for 30 s" in raised(lambda: way.failed(error("lost")))


def test_patience_waits_until_every_server_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Trio(monkeypatch, give_up=1.0)
    way = fleet.rotation()
    for name in "ab":
        assert way.endpoint.address == name
        way.failed(error("lost"))
        fleet.guard.now += 5
    assert raised(lambda: way.failed(error("lost"))) == "no server could go on for 1 s: a: lost; b: lost; c: lost"
    fleet = Trio(monkeypatch, give_up=1.0)
    way = fleet.rotation()
    way.failed(error("lost"))
    fleet.guard.now += 5
    way.succeeded()
    way.failed(error("lost"))
    assert fleet.guard.pauses == []


def test_reports_come_every_five_seconds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fleet = Trio(monkeypatch, 2, give_up=100.0)
    way = fleet.rotation()
    fleet.guard.now += 50
    with caplog.at_level(logging.INFO):
        for wait in (0.0, 4.75, 0.25, 4.75, 0.25):
            fleet.guard.now += wait
            now = fleet.guard.now
            way.failed(error("lost"))
            fleet.guard.now = now
    listed = ["a: lost", "a: lost; b: lost"]
    reports = [r.getMessage() for r in caplog.records if r.getMessage().startswith("no server")]
    assert reports == [f"no server could go on for {s} s of 100 s: {listed[1]}" for s in (5, 10)]
    lines = [(r.levelno, r.getMessage()) for r in caplog.records if not r.getMessage().startswith("no server")]
    assert lines == [(logging.WARNING, "lost; going to the next server")] * 2


def test_other_ranks_than_the_first_report_late_and_once_for_each_loss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a thousand ranks one is enough, unless it has its servers and another one has not."""
    fleet = Trio(monkeypatch, 1, give_up=100.0)
    fleet.speaks = False
    way = fleet.rotation()
    for begin in (2000.0, 3000.0):
        for wait in range(0, 90, 10):
            fleet.guard.now = begin + wait
            way.failed(error("lost"))
        way.succeeded()
    reports = [r.getMessage() for r in caplog.records if r.getMessage().startswith("no server")]
    assert reports == ["no server could go on for 30 s of 100 s: a: lost"] * 2


def test_servers_that_refuse_are_set_aside_until_another_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Trio(monkeypatch, give_up=100.0)
    way = fleet.rotation()
    way.failed(refusal("no"))
    assert fleet.refusals == {"a": "no"}
    asked = []
    for _ in range(5):
        asked.append(way.endpoint.address)
        way.failed(error("lost"))
    assert asked == ["b", "c", "b", "c", "b"]
    way.failed(refusal("never"))
    assert way.endpoint.address == "b"
    assert raised(lambda: way.failed(refusal("nor I"))) == "no server can do this: a: no; b: nor I; c: never"
    fleet.refusals = {"a": "no", "b": "no"}
    way = fleet.rotation()
    way.failed(error("lost"))
    assert way.endpoint.address == "c"
    way.succeeded()
    assert (fleet.current, fleet.refusals) == (2, {"a": "no", "b": "no"})
    way.failed(refusal("no"))
    assert way.endpoint.address == "a"
    way.succeeded()
    assert fleet.refusals == {"b": "no", "c": "no"}
    alone = Trio(monkeypatch, 1)
    with pytest.raises(ClientError, match="no"):
        alone.rotation().failed(refusal("no"))
    with pytest.raises(ClientError, match="never"):
        way.failed(error("never", ERROR_ACTION_GIVE_UP))


def test_servers_that_shut_down_are_left_without_a_failure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Trio(monkeypatch, give_up=10.0)
    way = fleet.rotation()
    way.drained()
    way.drained()
    assert (way.endpoint.address, fleet.guard.pauses, fleet.forgotten) == ("c", [], ["a", "b"])
    way.drained()
    assert fleet.guard.pauses == pytest.approx([fleet.pause(1)], rel=1e-12)
    way.succeeded()
    way.drained()
    assert (way.endpoint.address, len(fleet.guard.pauses)) == ("b", 1)
    way.failed(error("lost"))
    way.failed(error("lost"))
    assert (way.endpoint.address, len(fleet.guard.pauses)) == ("a", 2)
    fleet.guard.now += 20
    text = "server a answered DRAINING: it is shutting down, and no other server took over"
    assert raised(way.drained).startswith(f"no server could go on for 10 s: b: lost; c: lost; a: {text[9:]}")
    failure = DataServiceError("a", grpc.StatusCode.UNAVAILABLE, "DRAINING", text[28:], ERROR_ACTION_RETRY)
    assert str(failure) == f"server a answered DRAINING: {text[28:]}"


def test_a_stopped_guard_ends_pauses_and_calls() -> None:
    class Call:
        cancelled = 0

        def cancel(self) -> None:
            self.cancelled += 1

    guard, first, second = CallGuard(), Call(), Call()
    guard.interrupt()
    guard.pause(0)
    guard.hold(first)
    assert (first.cancelled, guard.cause()) == (0, None)
    guard.interrupt()
    assert (first.cancelled, str(guard.cause())) == (1, "no data came for as long as allowed")
    guard.hold(second)
    assert (second.cancelled, guard.cause()) == (0, None)
    guard.stop()
    assert (first.cancelled, second.cancelled) == (1, 1)
    assert isinstance(guard.cause(), ClosedError)
    for action in (lambda: guard.pause(0), lambda: guard.hold(first)):
        with pytest.raises(ClosedError, match="the reader was closed"):
            action()
    assert first.cancelled == 2


@pytest.mark.timeout(20)
def test_what_a_thread_uses_may_be_closed_by_a_collection_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is dropped is stopped by whatever thread collects it, also by its own, which has its locks."""
    guard, allocate = CallGuard(), threading._allocate_lock  # type: ignore[attr-defined]

    def collecting() -> object:
        monkeypatch.undo()
        guard.stop()
        return allocate()

    monkeypatch.setattr(threading, "_allocate_lock", collecting)
    with pytest.raises(ClosedError):
        guard.pause(0.01)

    class Opening:
        version = 0

        def open(self, address: str, options: list[tuple[str, int]]) -> grpc.Channel:
            endpoint.close()
            return grpc.insecure_channel(address, options)

    endpoint = Endpoint("localhost:1", Timeouts(), Opening())  # type: ignore[arg-type]
    endpoint.channel()
    endpoint.close()


def test_limits_and_defaults_of_addresses_timeouts_and_channels() -> None:
    defaults = {
        "connect": 5.0,
        "first_answer": 120.0,
        "call": 60.0,
        "register": 1800.0,
        "stall": 300.0,
        "give_up": 120.0,
    }
    for name, value in defaults.items():
        assert getattr(Timeouts(), name) == value
        Timeouts(**{name: 86400})
        Timeouts(**{name: 1e-9})
        for wrong in (0, -1, 86400.5):
            with pytest.raises(ValueError, match=f"timeout {name} is {wrong} s; a value in"):
                Timeouts(**{name: wrong})
    many = [f"h:{port}" for port in range(1, 1026)]
    assert parse_addresses(many[:1024]) == tuple(many[:1024])
    assert parse_addresses("h:1,h:65535") == ("h:1", "h:65535")
    with pytest.raises(AddressError, match="the list of addresses has more than 1024, which is reached at 'h:1025'"):
        parse_addresses(many)
    for wrong in ("h:0", "h:65536"):
        with pytest.raises(AddressError, match=f"found server address '{wrong}'; HOST:PORT"):
            parse_addresses(wrong)
    with pytest.raises(AddressError, match="server address 'a:1' is there twice; name each server once"):
        parse_addresses("a:1,b:1,a:1")
    assert dict(_channel_options(Timeouts(connect=2.5))) == {
        "grpc.keepalive_time_ms": 2000,
        "grpc.keepalive_timeout_ms": 5000,
        "grpc.http2.ping_timeout_ms": 5000,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.max_reconnect_backoff_ms": 2000,
        "grpc.initial_reconnect_backoff_ms": 200,
        "grpc.min_reconnect_backoff_ms": 2500,
        "grpc.use_local_subchannel_pool": 1,
        "grpc.enable_retries": 0,
        "grpc.enable_http_proxy": 0,
    }
    assert dict(_channel_options(Timeouts(connect=0.0001)))["grpc.min_reconnect_backoff_ms"] == 1


@dataclass
class Sized:
    nbytes: int


def test_a_handoff_counts_its_bytes_and_stalls_on_the_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, stalls = Trio(monkeypatch), []
    clock = fleet.guard
    handoff = Handoff(limit_bytes=10, stall_s=8.0)

    def stalled() -> None:
        stalls.append(clock.now)
        if len(stalls) % 2 == 0:
            handoff.put(Sized(3))  # type: ignore[arg-type]
        else:
            clock.now += 8

    handoff.admit(1000)
    handoff.put(Sized(4))  # type: ignore[arg-type]
    handoff.admit(6)
    handoff.put(Sized(6))  # type: ignore[arg-type]
    assert handoff.ready_bytes == 10
    assert [handoff.take(stalled), handoff.ready_bytes] == [Sized(4), 6]
    assert [handoff.take(stalled), handoff.ready_bytes, stalls] == [Sized(6), 0, []]
    for begin in (handoff.restart_clock, lambda: handoff.admit(1)):
        begin()
        clock.now += 8
        began = clock.now
        assert handoff.take(stalled) == Sized(3)
        assert stalls == [began, began + 8]
        stalls.clear()
    handoff.put(Sized(5))  # type: ignore[arg-type]
    handoff.finish(CutStreamError("cut"))
    assert handoff.take(stalled) == Sized(5)
    with pytest.raises(CutStreamError, match="cut"):
        handoff.take(stalled)
    handoff.finish(None)
    assert handoff.take(stalled) is None
    handoff.put(Sized(5))  # type: ignore[arg-type]
    handoff.close()
    assert handoff.ready_bytes == 0
    for action in (lambda: handoff.take(stalled), lambda: handoff.admit(1)):
        with pytest.raises(ClosedError, match="the reader was closed"):
            action()


def test_the_only_server_is_asked_again_and_one_that_refused_after_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Trio(monkeypatch, 1)
    way = alone.rotation()
    way.failed(error("lost"))
    way.failed(error("lost"))
    assert way.endpoint.address == "a"
    assert alone.guard.pauses == pytest.approx([alone.pause(1), alone.pause(2)], rel=1e-12)
    fleet = Trio(monkeypatch, 2)
    way = fleet.rotation()
    way.failed(refusal("no"))
    assert way.endpoint.address == "b"
    way.succeeded()
    way.failed(error("lost"))
    assert way.endpoint.address == "a"
    late = Trio(monkeypatch, 3, give_up=30.0)
    way = late.rotation()
    way.drained()
    way.failed(error("lost"))
    late.guard.now += 50
    way.failed(error("lost"))
    assert (way.endpoint.address, late.guard.pauses) == ("a", [0.0])


def test_before_the_first_answer_only_refusals_are_warnings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    levels = {}
    for reached in (True, False):
        fleet = Trio(monkeypatch)
        fleet.reached = reached
        way = fleet.rotation()
        with caplog.at_level(logging.INFO):
            caplog.clear()
            way.failed(refusal("no"))
            way.failed(error("lost"))
        levels[reached] = [(record.levelname, record.getMessage()) for record in caplog.records]
    texts = ["no; going to the next server", "lost; going to the next server"]
    assert levels[True] == [("WARNING", text) for text in texts]
    assert levels[False] == [("WARNING", texts[0]), ("INFO", texts[1])]
