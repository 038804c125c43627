"""A command that serves ends, however many signals come."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataserver.cli import ray, serve
from dataserver.cli.end_signals import ENDED, end_signals

MANY = 5_000
"""Signals that nobody has read: more than a socket takes."""
RUNS = 100
"""A signal comes at any moment of one of them."""


@pytest.mark.timeout(60)
def test_who_waits_is_woken_beside_more_signals_than_are_held(capfd: pytest.CaptureFixture[str]) -> None:
    """As from a script that sends a signal again and again until the process has ended."""
    before = signal.getsignal(signal.SIGTERM)
    with end_signals() as (next_signal, wake):
        for _ in range(MANY):
            signal.raise_signal(signal.SIGTERM)
        assert next_signal() == signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)
        ending = threading.Thread(target=wake)
        ending.start()
        ending.join()
        assert len(list(iter(next_signal, ENDED))) == 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert capfd.readouterr().err == "", "nothing is said of signals that find no room"


@pytest.mark.timeout(60)
def test_a_fleet_on_ray_is_drained_whenever_a_signal_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that sets an event would wait for the lock of whoever waits for that, which it interrupts."""
    timers, drained = list[threading.Timer](), list[float]()

    def look() -> None:
        if len(timers) == len(drained):
            timers.append(threading.Timer(len(timers) * 1e-5, os.kill, (os.getpid(), signal.SIGTERM)))
            timers[-1].start()

    fleet = SimpleNamespace(addresses=(), look=look, drain=drained.append)
    settings = SimpleNamespace(log_format="text", drain_grace_s=3.0)
    monkeypatch.setattr(ray, "LOOK_S", 0.0)
    monkeypatch.setattr(ray, "load_config", lambda *_: settings)
    monkeypatch.setattr(ray, "logs", SimpleNamespace(use=lambda _: None))
    monkeypatch.setattr(ray, "connected", lambda: nullcontext())
    monkeypatch.setattr(ray, "RayFleet", lambda *_: fleet)
    for _ in range(RUNS):
        ray.ray(Path("fleet.yaml"))
        timers[-1].join()
    assert drained == [3.0] * RUNS


def test_each_signal_is_told_and_then_the_end() -> None:
    """Others are not, such as one for which a library has a handler."""
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    with end_signals() as (next_signal, wake):
        assert next_signal(0.01) is None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(number)
            assert next_signal() == number
            assert next_signal(0) is None
        threading.Timer(0.05, wake).start()
        assert next_signal() == ENDED
    signal.signal(signal.SIGUSR2, before)


def test_a_server_that_a_signal_shows_to_have_ended_waits_for_what_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a script sends signals until the process has ended: the wake-up finds its socket open."""
    ended, left, found = threading.Event(), threading.Event(), list[bool]()

    @contextmanager
    def signals() -> Iterator[tuple[Callable[[], int], Callable[[], object]]]:
        def wake() -> None:
            ended.set()
            found.append(left.wait(0.2))

        yield lambda: ENDED if ended.wait(60) else -1, wake
        left.set()

    monkeypatch.setattr(serve, "end_signals", signals)
    monkeypatch.setattr(serve.faulthandler, "register", lambda *_, **__: None)
    config = SimpleNamespace(web_listen=None)
    server = SimpleNamespace(
        config=config, start=lambda: "127.0.0.1:1", metrics_url=None, health_address=None, wait=lambda: None
    )
    serve._serve(server)  # type: ignore[arg-type]
    assert found == [False]
