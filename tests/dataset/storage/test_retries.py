"""One retry budget a store, on a clock of the test's own."""

import threading
from collections.abc import Callable
from itertools import pairwise

import pytest

from dataserver.dataset.storage import retries
from dataserver.dataset.storage.client_interface import ChangedError, UnavailableError
from dataserver.dataset.storage.retries import LONGEST_PAUSE_S, PATIENCE_S, TOKENS, TOKENS_PER_S, RetryBudget


class Clock:
    """Time goes on where somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def budget(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> RetryBudget:
    budget = RetryBudget("s3://bucket", clock)
    monkeypatch.setattr(budget._changed, "wait", clock.wait)
    return budget


def failing(times: int, clock: Clock, asked: list[float], retry_after_s: float | None = None) -> Callable[[], str]:
    def action() -> str:
        asked.append(clock.now)
        if len(asked) <= times:
            raise UnavailableError("503", retry_after_s)
        return "here"

    return action


def test_trouble_that_passes_is_waited_for_longer_each_time(budget: RetryBudget, clock: Clock) -> None:
    asked: list[float] = []
    assert budget.call(failing(5, clock, asked)) == "here"
    pauses = [b - a for a, b in pairwise(asked)]
    assert all(0 < pause <= LONGEST_PAUSE_S for pause in pauses)
    assert pauses[-1] > 4 * pauses[0]


def test_trouble_that_stays_ends(budget: RetryBudget, clock: Clock) -> None:
    asked: list[float] = []
    began = clock.now
    with pytest.raises(UnavailableError, match="s3://bucket does not answer: 503; given up"):
        budget.call(failing(10**6, clock, asked))
    assert clock.now - began <= PATIENCE_S
    assert len(asked) < 20


@pytest.mark.parametrize("seconds", [1.0, 7.0, PATIENCE_S - 1])
def test_what_a_store_asks_to_wait_is_waited(budget: RetryBudget, clock: Clock, seconds: float) -> None:
    asked: list[float] = []
    assert budget.call(failing(1, clock, asked, seconds)) == "here"
    assert asked[1] - asked[0] >= seconds


def test_who_would_wait_for_too_long_is_told_at_once_and_others_with_him(budget: RetryBudget, clock: Clock) -> None:
    asked: list[float] = []
    began = clock.now
    for _ in range(50):
        with pytest.raises(UnavailableError):
            budget.call(failing(10**6, clock, asked, 2 * PATIENCE_S))
    assert (clock.now, len(asked)) == (began, 1)
    clock.now += 2 * PATIENCE_S
    asked.clear()
    assert budget.call(failing(0, clock, asked)) == "here"


def test_a_storm_of_many_callers_costs_few_requests(budget: RetryBudget, clock: Clock) -> None:
    asked: list[float] = []
    began = clock.now
    for _ in range(200):
        with pytest.raises(UnavailableError):
            budget.call(failing(10**9, clock, asked))
    took = clock.now - began
    assert len(asked) <= 1 + TOKENS + took * TOKENS_PER_S + 1


def test_after_a_storm_nobody_waits(budget: RetryBudget, clock: Clock) -> None:
    asked: list[float] = []
    budget.call(failing(6, clock, asked))
    began = clock.now
    for _ in range(1000):
        budget.call(failing(0, clock, []))
    assert clock.now == began


@pytest.mark.parametrize("error", [ChangedError("x"), FileNotFoundError(2, "x"), PermissionError(13, "x")])
def test_what_asking_again_does_not_help_is_not_asked_again(budget: RetryBudget, error: OSError) -> None:
    asked = 0

    def action() -> None:
        nonlocal asked
        asked += 1
        raise error

    with pytest.raises(type(error)):
        budget.call(action)
    assert asked == 1


def test_threads_wait_together() -> None:
    """On a real clock: one success ends the pause of all."""
    budget = RetryBudget("s3://bucket")
    asked: list[int] = []
    lock = threading.Lock()

    def action() -> str:
        with lock:
            asked.append(1)
            if len(asked) <= 8:
                raise UnavailableError("503")
        return "here"

    threads = [threading.Thread(target=budget.call, args=(action,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert 16 <= len(asked) <= 24


def test_a_success_that_was_under_way_ends_no_pause(
    budget: RetryBudget, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it make the next one shorter."""

    def slow() -> str:
        with monkeypatch.context() as short:
            short.setattr(retries, "PATIENCE_S", 5.0)
            with pytest.raises(UnavailableError, match="given up"):
                budget.call(failing(1, clock, [], 7.0))
        return "here"

    assert budget.call(slow) == "here"
    began, asked = clock.now, []
    assert budget.call(failing(0, clock, asked)) == "here"
    assert asked[0] - began >= 7.0


def test_first_tries_of_many_callers_are_few_while_a_store_fails(
    budget: RetryBudget, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come together behind a pause: each while the request of the one before is under way."""
    asked: list[float] = []

    def action() -> None:
        asked.append(clock.now)
        if len(asked) < 2 * TOKENS:
            with pytest.raises(UnavailableError):
                budget.call(action)
        raise UnavailableError("503")

    monkeypatch.setattr(retries, "PATIENCE_S", 5.0)
    with pytest.raises(UnavailableError):
        budget.call(failing(1, clock, [], 7.0))
    clock.now += 10.0
    began = clock.now
    monkeypatch.setattr(retries, "PATIENCE_S", 1.0)
    with pytest.raises(UnavailableError):
        budget.call(action)
    assert len(asked) <= TOKENS + (clock.now - began) * TOKENS_PER_S + 1
