"""Python's garbage collector, between steps alone: by itself it stopped single steps for a third of a second."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

WARM_UP: Final = 3
"""Steps that make what lasts, such as compiled code."""
WHOLE_EVERY: Final = 200
"""Steps from one collection of all generations to the next."""


@contextmanager
def collected_between_steps() -> Iterator[None]:
    """Collect nothing in the body but what `collect` does."""
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def collect_young() -> None:
    """Collect what is young, as between two steps of a long evaluation."""
    gc.collect(1)


def collect(steps: int) -> None:
    """Collect after so many steps: what is young, and at times everything; what is left then is not looked at again.

    All processes do so after the same steps, so that none waits for another one's.
    """
    if steps % WHOLE_EVERY:
        collect_young()
    else:
        gc.collect()
    if steps <= WARM_UP or not steps % WHOLE_EVERY:
        gc.freeze()  # while it is made, what lasts is not worth looking through: that takes a third of a second
