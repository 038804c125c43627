"""One retry budget for each store: however many threads meet its trouble, it is asked again seldom, and not for ever.

Whoever is refused makes all wait: for as long as the store asked (Retry-After), or for a time that doubles while it
goes on failing. What was under way and succeeds ends no pause, and says nothing about the store behind it. Besides,
requests take tokens while a store fails: there are few, and they come back slowly.
"""

import logging
import random
import threading
from collections.abc import Callable
from time import monotonic
from typing import Final, TypeVar

from dataserver.dataset.storage.client_interface import UnavailableError

PATIENCE_S: Final = 30.0
"""The longest that one request is repeated for."""
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 8.0
TOKENS: Final = 64.0
"""Retries at once after a quiet time."""
TOKENS_PER_S: Final = 2.0
TOKENS_OF_SUCCESS: Final = 0.1
WARN_EVERY_S: Final = 5.0

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class RetryBudget:
    """How often a store may be asked again. Thread-safe."""

    def __init__(self, name: str, clock: Callable[[], float] = monotonic) -> None:
        self.name = name
        self._clock = clock
        self._changed = threading.Condition()
        self._tokens = TOKENS
        self._counted_at = clock()
        self._pause_s = FIRST_PAUSE_S
        self._paused_until = 0.0
        self._warned_at = -WARN_EVERY_S
        self._is_failing = False

    def call(self, action: Callable[[], Result]) -> Result:
        """Do what asks the store, again where it is unavailable.

        Raises:
            UnavailableError: it stayed so for `PATIENCE_S`, or would by what it asked to wait for.
            OSError: what else `action` raised.
        """
        until = self._clock() + PATIENCE_S
        took_token, failure = self._wait(until, None), None
        while True:
            began = self._clock()
            try:
                found = action()
            except UnavailableError as error:
                failure = error
                self._failed(error)
            else:
                self._succeeded(began, took_token and failure is None)
                return found
            self._wait(until, failure)

    def _wait(self, until: float, failure: UnavailableError | None) -> bool:
        """Wait for the end of the pause, and for a token while the store fails; whether one was taken.

        Args:
            until: wait no longer.
            failure: of the request that is made again; None for a first one.
        """
        with self._changed:
            while True:
                now = self._clock()
                self._tokens = min(TOKENS, self._tokens + (now - self._counted_at) * TOKENS_PER_S)
                self._counted_at = now
                ready = self._paused_until
                cost = 1.0 if failure or self._is_failing else 0.0
                if cost and self._tokens < cost:
                    ready = max(ready, now + (cost - self._tokens) / TOKENS_PER_S)
                if ready <= now:
                    self._tokens -= cost
                    return cost > 0
                if ready > until:
                    why = failure.strerror if failure else "it is not asked while it is out of order"
                    raise UnavailableError(f"{self.name} does not answer: {why}; given up") from failure
                self._changed.wait(ready - now)

    def _failed(self, error: UnavailableError) -> None:
        with self._changed:
            now = self._clock()
            self._is_failing = True
            if now >= self._paused_until:  # one pause for all that were under way together
                self._paused_until = now + self._pause_s * random.uniform(0.5, 1.0)  # noqa: S311
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            if error.retry_after_s is not None:
                self._paused_until = max(self._paused_until, now + error.retry_after_s)
            if now < self._warned_at + WARN_EVERY_S:
                return
            self._warned_at = now
        _log.warning("%s does not answer as it should (%s); it is asked again", self.name, error.strerror)

    def _succeeded(self, began: float, gives_back: bool) -> None:
        """Note that a request that began then had an answer, and whether it gives the token of a first try back."""
        with self._changed:
            self._tokens = min(TOKENS, self._tokens + (1.0 if gives_back else TOKENS_OF_SUCCESS))
            if began < self._paused_until:
                return  # it was under way when another one failed
            was_failing, self._is_failing = self._is_failing, False
            self._pause_s = FIRST_PAUSE_S
            if was_failing:
                self._changed.notify_all()  # nobody needs a token now
        if was_failing:
            _log.info("%s answers again", self.name)


def gave_up(error: BaseException | None) -> bool:
    """Whether an error comes from a store that was asked again for as long as its budget lets it."""
    while error is not None and not isinstance(error, UnavailableError):
        error = error.__cause__
    return error is not None
