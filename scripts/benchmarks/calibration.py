"""How fast this core is, so that times can be held against targets that were set on another machine.

Three fixed loops stand for what our code does: plain Python, numpy on small arrays, and compiled code. Their time here
over their time on the reference machine is the slowdown; a benchmark divides its times by it. The loops run right
beside what they scale, so that a machine which is slow for a while does not miss a target for that.
"""

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeVar

import numba
import numpy as np

REFERENCE: Final = "one core of a shared two-core virtual machine (AMD EPYC, Zen 5), Python 3.11"
REFERENCE_MS: Final = {"python": 5.0, "numpy": 1.6, "compiled": 1.6}
"""CPU time of each loop on the reference machine, with nothing else running."""
ROUNDS: Final = 3

T = TypeVar("T")


def slowdown() -> float:
    """How many times slower than the reference machine this core is now, in CPU time; takes about 30 ms.

    The mean over the loops, each by the median of a few rounds.
    """
    return statistics.fmean(ms / REFERENCE_MS[name] for name, ms in loop_times().items())


def loop_times(rounds: int = ROUNDS) -> dict[str, float]:
    """CPU time of each loop here, milliseconds, the median of some rounds."""
    found = {}
    for name, loop in _loops().items():
        found[name] = statistics.median(_cpu_ms(loop)[1] for _ in range(rounds))
    return found


def timed(run: Callable[..., T], *arguments: Any, repeat: int = 1) -> tuple[T, float]:
    """What `run` returns for the arguments, and the least CPU time of `repeat` calls, in milliseconds of the reference
    machine.

    Nothing is called beforehand: whoever wants kernels loaded calls `run` once before.
    """
    before = slowdown()
    calls = [_cpu_ms(run, *arguments) for _ in range(repeat)]
    return calls[-1][0], min(ms for _, ms in calls) / statistics.fmean((before, slowdown()))


def _cpu_ms(run: Callable[..., T], *arguments: Any) -> tuple[T, float]:
    started = time.thread_time_ns()
    result = run(*arguments)
    return result, (time.thread_time_ns() - started) / 1e6


@cache
def _loops() -> dict[str, Callable[[], Any]]:
    """The loops, compiled and called once."""
    values = np.random.default_rng(0).integers(0, 1 << 40, 4_000)
    compiled = numba.njit(cache=False)(_lightest_bins)
    loops: dict[str, Callable[[], Any]] = {
        "python": lambda: _counted_words(20_000),
        "numpy": lambda: [_sorted_sums(values) for _ in range(20)],
        "compiled": lambda: compiled(values, np.zeros(2_000, np.int64)),
    }
    for loop in loops.values():
        loop()
    return loops


def _counted_words(count: int) -> dict[str, int]:
    """Integers, strings, tuples, a dictionary and calls."""
    found: dict[str, int] = {}
    for number in range(count):
        key = str(number * 7919 % 997)
        found[key] = max(found.get(key, 0), len((key, number)) + number)
    return found


def _sorted_sums(values: np.ndarray) -> np.ndarray:
    """What planning asks of numpy: a stable order, gathered, summed up, counted."""
    order = np.argsort(values, kind="stable")
    totals = np.cumsum(values[order])
    return np.bincount(order % 64, minlength=64) + np.searchsorted(totals, totals[::64])[:1]


def _lightest_bins(loads: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Each load to the bin with the least, which is looked for among all; as a compiled loop."""
    for load in loads:
        best = 0
        for b in range(len(totals)):
            if totals[b] < totals[best]:
                best = b
        totals[best] += load
    return totals
