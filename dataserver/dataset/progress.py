"""How far long work is, for whoever shows that."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Progress = Callable[[int, int], object]
"""Called with what is done, and with all that is to do."""
Thing = TypeVar("Thing")


def untold(_done: int, _total: int) -> None:
    """Tell nobody."""


def told(things: Sequence[Thing], progress: Progress) -> Iterator[Thing]:
    """Yield things one after the other, and tell before each and in the end how many are done."""
    for done, thing in enumerate(things):
        progress(done, len(things))
        yield thing
    progress(len(things), len(things))
