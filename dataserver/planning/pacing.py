"""Where planning can be interrupted.

Planning calls `pace` between bounded pieces of work. By itself that does nothing; a server uses it to let the plans of
several jobs take turns, and to give up a plan that nobody waits for. What is planned does not depend on it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Pace = Callable[[], None]


def _go_on() -> None:
    """Nobody else waits."""


_pace: ContextVar[Pace] = ContextVar("pace", default=_go_on)


def pace() -> None:
    """A place where planning may wait, or end with an exception."""
    _pace.get()()


@contextmanager
def paced(by: Pace) -> Iterator[None]:
    """Call `by` at every place where what runs inside may be interrupted, in this thread."""
    token = _pace.set(by)
    try:
        yield
    finally:
        _pace.reset(token)
