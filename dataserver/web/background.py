"""Work that takes longer than a request may: done once in a thread of its own, and asked after again and again."""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from http import HTTPStatus
from time import monotonic
from typing import Any, Final, NoReturn

from dataserver.dataset import DatasetError, Progress
from dataserver.planning.balancing import BinBudgetError
from dataserver.planning.job.identity import JobSpecError
from dataserver.planning.job.limits import PlanLimitError
from dataserver.planning.stream.order import DatasetEmptyError, StepOutOfRangeError
from dataserver.planning.stream.sizing import MicrobatchTooLargeError, SampleTooLargeError
from dataserver.web.server import RequestError

EXPECTED: Final = (
    RequestError,
    DatasetError,
    JobSpecError,
    PlanLimitError,
    StepOutOfRangeError,
    DatasetEmptyError,
    SampleTooLargeError,
    MicrobatchTooLargeError,
    BinBudgetError,
    OSError,
    MemoryError,
)
"""What a dataset, a job or this machine may be to blame for: shown in words. All else is a defect, and logged."""

MAX_WAITING: Final = 8
"""Pieces of work that wait; one more is refused."""
WANTED_S: Final = 5.0
"""Seconds after a question for which somebody is taken to wait for the answer; pages ask again within a second."""
MAX_FOUND: Final = 24
"""Results that are remembered; the least recently asked for go first."""

_log = logging.getLogger(__name__)


class _Work:
    def __init__(self, key: Hashable, run: Callable[[Progress], Any], is_wanted_later: bool) -> None:
        self.key, self.run, self.is_wanted_later = key, run, is_wanted_later
        self.done, self.of = 0, 0
        self.has_begun = False
        self.asked_at = monotonic()
        self.answer: dict[str, Any] | None = None

    def report(self, done: int, of: int) -> None:
        self.done, self.of = done, of

    def is_wanted(self) -> bool:
        return self.is_wanted_later or monotonic() - self.asked_at < WANTED_S


def _done(_progress: Progress) -> NoReturn:
    raise AssertionError("work that is done is not done again")


class Background:
    """Does one piece of work after the other. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._works: OrderedDict[Hashable, _Work] = OrderedDict()
        """Those that wait, the one that is done, and those that were; the one asked for last comes last."""
        self._waiting: deque[_Work] = deque()
        self._closed = False
        self.thread = threading.Thread(target=self._working, name="web-work", daemon=True)
        self.thread.start()

    def ask(self, key: Hashable, run: Callable[[Progress], Any], is_wanted_later: bool = False) -> dict[str, Any]:
        """What became of a piece of work, which begins with the first question.

        What waits is given up when nobody has asked for it for some seconds; the next question puts it last.

        Args:
            key: of the work; the same key is the same work.
            run: does it.
            is_wanted_later: it is done even where nobody asks again.

        Returns:
            `found`, or `error` in words, or `working` with what is done of how much, and whether it has `begun`.

        Raises:
            RequestError: too much work waits.
        """
        with self._changed:
            work = self._works.get(key)
            if work is None:
                self._give_up()
                if len(self._waiting) >= MAX_WAITING:
                    raise RequestError("too much is being worked out; ask again later", HTTPStatus.SERVICE_UNAVAILABLE)
                work = self._works[key] = _Work(key, run, is_wanted_later)
                self._waiting.append(work)
                self._changed.notify()
            work.asked_at = monotonic()
            self._works.move_to_end(key)
            self._forget()
            if work.answer is not None and "error" in work.answer:
                del self._works[key]  # whoever asks again after putting it right gets another try
            return work.answer or {"working": {"done": work.done, "of": work.of, "begun": work.has_begun}}

    def close(self) -> None:
        """Begin no further work once what runs is done."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _give_up(self) -> None:
        """Forget what waits and is wanted no more."""
        for work in [work for work in self._waiting if not work.is_wanted()]:
            self._waiting.remove(work)
            del self._works[work.key]

    def _forget(self) -> None:
        for key in [key for key, work in self._works.items() if work.answer is not None]:
            if len(self._works) <= MAX_FOUND:
                return
            del self._works[key]

    def _working(self) -> None:
        while (work := self._next()) is not None:
            try:
                answer = {"found": work.run(work.report)}
            except EXPECTED as error:
                answer = {"error": str(error) or type(error).__name__}
            except Exception:
                _log.exception("a page cannot be worked out")
                answer = {"error": "a defect of this server; its log has the details"}
            work.answer, work.run = answer, _done  # what it was made of is not held

    def _next(self) -> _Work | None:
        """The piece of work that has waited longest; None at the end."""
        with self._changed:
            while not self._closed:
                self._give_up()
                if self._waiting:
                    work = self._waiting.popleft()
                    work.has_begun = True
                    return work
                self._changed.wait()
            return None
