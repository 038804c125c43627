import tracemalloc
from dataclasses import dataclass, field

import numpy as np
import pytest
from builders.jobs import job_data

from dataserver.jobs.memory_usage import memory_of
from dataserver.planning.job.identity import parse_job


@dataclass(frozen=True, slots=True)
class Slotted:
    values: np.ndarray = field(default_factory=lambda: np.zeros(100_000))
    names: tuple[str, ...] = ("a" * 5000,)


class Observed:
    """As `dataclass(weakref_slot=True)` was before Python 3.11.3: its weak references cannot be read."""

    __slots__ = ("__weakref__", "values")

    def __init__(self) -> None:
        self.values = np.zeros(100_000)


def _unreadable(_: Observed) -> None:
    raise TypeError("descriptor '__weakref__' for 'Observed' objects doesn't apply to a 'Observed' object")


Observed.__weakref__ = property(_unreadable)  # type: ignore[misc, assignment]


@pytest.mark.parametrize(
    "make",
    [
        lambda i: parse_job({**job_data(), "stream": {**job_data()["stream"], "seed": i}}),
        lambda _: Slotted(),
        lambda _: Observed(),
        lambda _: np.zeros((300, 300))[:2],
        lambda i: {f"{i}.{k}": [bytes(100)] for k in range(1000)},
    ],
    ids=["job", "slots", "weak references", "view", "containers"],
)
def test_the_estimate_is_near_what_python_takes_and_not_below(make: object) -> None:
    make(0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        made = [make(i) for i in range(1, 11)]
        taken = (tracemalloc.get_traced_memory()[0] - before) / len(made)
    finally:
        tracemalloc.stop()
    assert 0.95 * taken <= memory_of(made[0]) <= 3 * taken


def test_what_two_share_counts_once() -> None:
    shared = np.zeros(1000)
    assert memory_of((shared, shared, shared[:10])) < 1.1 * memory_of((shared,))
