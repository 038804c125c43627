"""The handoff between the receiving thread and the caller, where their waits cross."""

import itertools
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from trainclient.stream import handoff as module
from trainclient.stream.errors import ClosedError
from trainclient.stream.handoff import MAX_READY, Handoff


@dataclass
class Sized:
    nbytes: int


def microbatch(nbytes: int = 10) -> Any:
    return Sized(nbytes)


@pytest.mark.timeout(20)
def test_a_stall_is_noticed_by_a_caller_that_waited_before_the_receiver_had_room() -> None:
    handoff = Handoff(limit_bytes=10, stall_s=0.05)
    handoff.put(microbatch())
    receiver = threading.Thread(target=handoff.admit, args=(10,))
    receiver.start()
    while handoff._stalled_at is not None:  # until the receiver waits for room, with the clock stopped
        time.sleep(0.001)
    assert handoff.take(pytest.fail) is not None
    # The receiver may be slower to wake than the caller is to wait again; it never sends anything.
    assert handoff.take(lambda: handoff.finish(None)) is None
    receiver.join()


@pytest.mark.timeout(20)
def test_nothing_stalls_while_the_clock_is_stopped() -> None:
    handoff = Handoff(limit_bytes=10, stall_s=0.05)
    stalls: list[float] = []
    handoff.stop_clock()
    late = threading.Timer(0.2, lambda: handoff.put(microbatch()))
    late.start()
    assert handoff.take(lambda: stalls.append(time.monotonic())) is not None
    assert not stalls
    late.join()


@pytest.mark.timeout(20)
def test_a_server_that_waited_to_be_told_has_the_whole_time_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    computed_s = 0.0

    def now() -> float:
        return time.monotonic() + computed_s

    def stall() -> None:
        stalls.append(now())
        handoff.finish(None)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=now))
    handoff, told, stalls = Handoff(limit_bytes=10, stall_s=0.05), list[float](), list[float]()
    handoff.when_emptied(lambda: told.append(now()))
    handoff.put(microbatch())
    computed_s = 3600.0
    before = now()
    assert handoff.take(pytest.fail) is not None
    assert len(told) == 1
    assert handoff.take(stall) is None
    assert stalls[0] >= before + 0.05


@pytest.mark.timeout(20)
def test_the_last_microbatch_may_be_taken_while_the_receiver_looks_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    handoff = Handoff(limit_bytes=40, stall_s=60)
    for nbytes in (10, 25):
        handoff.put(microbatch(nbytes))
    looked, fits = threading.Event(), handoff._fits

    def taken_meanwhile(nbytes: int) -> bool:
        found = fits(nbytes)
        if len(handoff._ready) == 1:
            handoff._ready.popleft()  # as the caller does, without the lock
        looked.set()
        return found

    monkeypatch.setattr(handoff, "_fits", taken_meanwhile)
    receiver = threading.Thread(target=lambda: (handoff.admit(25), handoff.put(microbatch(25))))
    receiver.start()
    assert looked.wait(10)
    taken = [handoff.take(pytest.fail) for _ in range(2)]
    assert [one and one.nbytes for one in taken] == [10, 25]
    receiver.join()


def test_what_is_put_after_the_end_is_dropped() -> None:
    handoff = Handoff(limit_bytes=10, stall_s=60)
    handoff.close()
    handoff.put(microbatch())
    assert not handoff.ready
    with pytest.raises(ClosedError):
        handoff.take(pytest.fail)


@pytest.mark.timeout(20)
def test_close_wakes_a_receiver_that_waits_for_room() -> None:
    handoff = Handoff(limit_bytes=10, stall_s=60)
    handoff.put(microbatch())
    closing = threading.Timer(0.05, handoff.close)
    closing.start()
    with pytest.raises(ClosedError):
        handoff.admit(10)
    closing.join()


@pytest.mark.timeout(20)
def test_a_receiver_that_closes_its_own_reader_as_it_begins_to_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a collection in its thread does, which finds that the reader was dropped."""
    handoff, allocate = Handoff(limit_bytes=10, stall_s=60), threading._allocate_lock  # type: ignore[attr-defined]
    handoff.put(microbatch())
    handoff.put(microbatch())

    def collecting() -> object:
        monkeypatch.setattr(threading, "_allocate_lock", allocate)
        handoff.close()
        return allocate()

    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(threading, "_allocate_lock", collecting)
    with pytest.raises(ClosedError):
        handoff.admit(10)


@pytest.mark.timeout(20)
def test_small_microbatches_are_bounded_in_number() -> None:
    handoff = Handoff(limit_bytes=10 * MAX_READY, stall_s=60)
    for _ in range(MAX_READY - 1):
        handoff.put(microbatch(1))
    handoff.admit(1)  # there is room for one more
    handoff.put(microbatch(1))
    assert woken_after(handoff, 1) == (MAX_READY // 2, 1)


@pytest.mark.timeout(20)
def test_a_large_microbatch_waits_until_it_fits() -> None:
    handoff = Handoff(limit_bytes=40, stall_s=60)
    for _ in range(4):
        handoff.put(microbatch())
    assert woken_after(handoff, 25) == (3, 2)


def woken_after(handoff: Handoff, nbytes: int) -> tuple[int, int]:
    """How many microbatches are taken before a receiver has room, and how often it is woken for that."""
    receiver, woken = threading.Thread(target=handoff.admit, args=(nbytes,)), 0
    receiver.start()
    for taken in itertools.count():
        while receiver.is_alive() and not handoff._changed._waiters:  # type: ignore[attr-defined]
            time.sleep(0.001)
        if not receiver.is_alive():
            return taken, woken
        handoff.take(pytest.fail)
        woken += not handoff._changed._waiters  # type: ignore[attr-defined]
    raise AssertionError


@pytest.mark.timeout(20)
def test_a_receiver_whose_stream_ended_for_want_of_reading_waits_for_the_caller() -> None:
    handoff = Handoff(limit_bytes=100, stall_s=0.05)
    handoff.await_caller()  # nothing is left
    for _ in range(2):
        handoff.put(microbatch())
    taking = threading.Timer(0.2, handoff.take, (pytest.fail,))
    taking.start()
    handoff.await_caller()
    assert handoff.ready_bytes == 10, "it went on before one was taken"
    taking.join()
    closing = threading.Timer(0.05, handoff.close)
    closing.start()
    with pytest.raises(ClosedError):
        handoff.await_caller()
    closing.join()


def test_what_can_be_had_without_waiting() -> None:
    handoff = Handoff(limit_bytes=100, stall_s=60)
    assert not handoff.ready
    handoff.put(microbatch(1))
    assert handoff.ready
    handoff.take(pytest.fail)
    assert not handoff.ready
