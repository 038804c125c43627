"""What takes long is done once, in order, as long as somebody waits for it; failures are told in words."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dataserver.dataset import DatasetError
from dataserver.web.background import MAX_WAITING, Background
from dataserver.web.server import RequestError


@pytest.fixture
def work() -> Iterator[Background]:
    found = Background()
    yield found
    found.close()


def finished(work: Background, key: Any, run: Callable[[Any], Any]) -> dict[str, Any]:
    end = time.monotonic() + 60
    while "working" in (answer := work.ask(key, run)):
        assert time.monotonic() < end
        time.sleep(0.005)
    return answer


def test_it_is_done_once_and_says_how_far_it_is(work: Background) -> None:
    told, go_on, times = threading.Event(), threading.Event(), []

    def run(report: Any) -> int:
        times.append(1)
        report(3, 7)
        told.set()
        go_on.wait(60)
        return 5

    work.ask("a", run)
    assert told.wait(60)
    assert work.ask("a", run) == {"working": {"done": 3, "of": 7, "begun": True}}
    assert work.ask("b", run) == {"working": {"done": 0, "of": 0, "begun": False}}
    go_on.set()
    assert finished(work, "a", run) == finished(work, "a", run) == {"found": 5}
    finished(work, "b", run)
    assert len(times) == 2


def test_an_error_is_told_and_the_next_question_tries_again(work: Background) -> None:
    failures = [DatasetError("it is not indexed; run dataserver index")]

    def run(_: Any) -> str:
        if failures:
            raise failures.pop()
        return "well"

    assert finished(work, "a", run) == {"error": "it is not indexed; run dataserver index"}
    assert finished(work, "a", run) == {"found": "well"}


@pytest.mark.parametrize("defect", [ValueError("shapes differ"), IndexError("of a list"), RuntimeError("other")])
def test_a_defect_is_logged_and_no_text_of_it_is_shown(
    work: Background, defect: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def run(_: Any) -> None:
        raise defect

    assert finished(work, "a", run) == {"error": "a defect of this server; its log has the details"}
    assert str(defect) in caplog.text
    assert finished(work, "b", lambda _: 1) == {"found": 1}, "it goes on"


def test_what_nobody_waits_for_any_more_is_given_up(work: Background, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun, done = threading.Event(), threading.Event(), []

    def first(_: Any) -> None:
        begun.set()
        go_on.wait(60)

    work.ask("first", first)
    assert begun.wait(60)
    for n in range(MAX_WAITING - 1):
        work.ask(n, done.append)
    work.ask("job", lambda _: done.append("job"), is_wanted_later=True)
    with pytest.raises(RequestError, match="too much"):
        work.ask("more", done.append)
    monkeypatch.setattr("dataserver.web.background.WANTED_S", 0.0)
    work.ask("last", lambda _: done.append("last"), is_wanted_later=True)
    go_on.set()
    monkeypatch.setattr("dataserver.web.background.WANTED_S", 60.0)
    finished(work, "last", done.append)
    assert done == ["job", "last"]


def test_after_its_end_nothing_begins() -> None:
    work, begun, go_on, done = Background(), threading.Event(), threading.Event(), []

    def first(_: Any) -> None:
        begun.set()
        go_on.wait(60)

    work.ask("first", first)
    assert begun.wait(60)
    work.ask("second", done.append)
    work.close()
    go_on.set()
    work.thread.join(60)
    assert not work.thread.is_alive()
    assert done == []
