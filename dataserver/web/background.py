"""Work that takes longer than a request may: done once in a thread of its own, and asked after again and again."""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from http import HTTPStatus
from typing import Any, Final

from dataserver.web.server import RequestError

MAX_WAITING: Final = 8
"""Pieces of work that wait; one more is refused."""
MAX_FOUND: Final = 24
"""Results that are remembered; the least recently asked for go first."""

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Told what is done, and of how much."""


class _Work:
    def __init__(self, run: Callable[[Progress], Any]) -> None:
        self.run = run
        self.done, self.of = 0, 0
        self.answer: dict[str, Any] | None = None

    def report(self, done: int, of: int) -> None:
        self.done, self.of = done, of


class Background:
    """Does one piece of work after the other. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: OrderedDict[Hashable, _Work] = OrderedDict()
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        threading.Thread(target=self._working, name="web-work", daemon=True).start()

    def ask(self, key: Hashable, run: Callable[[Progress], Any]) -> dict[str, Any]:
        """What became of a piece of work, which begins with the first question.

        Args:
            key: of the work; the same key is the same work.
            run: does it.

        Returns:
            `found`, or `error` in words, or `working` with what is done of how much.

        Raises:
            RequestError: too much work waits.
        """
        with self._lock:
            work = self._works.get(key)
            if work is None:
                if sum(w.answer is None for w in self._works.values()) > MAX_WAITING:
                    raise RequestError("too much is being worked out; ask again later", HTTPStatus.SERVICE_UNAVAILABLE)
                work = self._works[key] = _Work(run)
                self._queue.put(work)
            self._works.move_to_end(key)
            self._forget()
            if work.answer is not None and "error" in work.answer:
                del self._works[key]  # whoever asks again after putting it right gets another try
        return work.answer or {"working": {"done": work.done, "of": work.of}}

    def close(self) -> None:
        """Begin nothing more."""
        self._queue.put(None)

    def _forget(self) -> None:
        for key in [key for key, work in self._works.items() if work.answer is not None]:
            if len(self._works) <= MAX_FOUND:
                return
            del self._works[key]

    def _working(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work.answer = {"found": work.run(work.report)}
            except (ValueError, OSError, MemoryError, IndexError) as error:
                work.answer = {"error": str(error) or type(error).__name__}
            except Exception:
                _log.exception("a page cannot be worked out")
                work.answer = {"error": "a defect of this server; its log has the details"}
