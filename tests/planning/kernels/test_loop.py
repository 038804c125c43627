"""Machine code is called with what its function would get, gives what it would give, and never needs its compiler."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from dataserver.planning import I64, U64, Bool
from dataserver.planning.kernels import inlined_part, kernel, part

ROOT = Path(__file__).parents[3]


class Table(NamedTuple):
    values: I64
    chosen: Bool
    bounds: tuple[int, int]


@part
def _weighed(value: int, weight: int) -> int:
    return value * weight


@inlined_part
def _within(value: int, low: int, high: int) -> bool:
    return low <= value < high


def weigh(table: Table, words: U64, weight: int, whole: bool, out: I64) -> tuple[int, int]:
    """Weighs what a table holds within its bounds; the sum, and how many there are."""
    total, count = 0, 0
    for row in range(table.values.shape[0]):
        for column in range(table.values.shape[1]):
            value = table.values[row, column]
            if (whole or table.chosen[column]) and _within(value, table.bounds[0], table.bounds[1]):
                out[row, column] = _weighed(value, weight) + np.int64(words[column] >> np.uint64(60))
                total += out[row, column]
                count += 1
    return total, count


def is_sorted(values: I64) -> bool:
    falls = 0
    for k in range(1, len(values)):
        falls += values[k] < values[k - 1]
    return falls == 0


def quotient(a: int, b: int) -> int:
    return a // b


def double(values: I64) -> None:
    for k in range(len(values)):
        values[k] *= 2


@pytest.fixture
def compiled(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A kernel that is kept elsewhere than the planner's."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "loops"))
    return kernel


def arrays() -> list[I64]:
    """The same numbers in every layout: C, Fortran, strided, reversed, read-only, and none at all."""
    whole = np.arange(-6, 18, dtype=np.int64).reshape(4, 6) * 7 % 23
    wide = np.zeros((8, 18), np.int64)
    wide[::2, ::3] = whole
    fixed = whole.copy()
    fixed.flags.writeable = False
    return [whole, np.asfortranarray(whole), wide[::2, ::3], whole[::-1, ::-1], fixed, whole[:0]]


def test_layouts_tuples_and_scalars_arrive_as_they_are(compiled: Callable[..., Any]) -> None:
    loop = compiled(weigh)
    chosen = np.arange(6) % 2 == 0
    words = np.arange(6, dtype=np.uint64) * np.uint64((1 << 61) + 3)
    for values in arrays():
        for weight, whole in ((3, False), (np.int64(-2), True)):
            results = []
            for function in (weigh, loop):
                out = np.zeros((4, 6), np.int64)
                found = function(Table(values, chosen, (2, 20)), words, weight, whole, out)
                results.append((tuple(map(int, found)), out.tolist()))
            assert results[0] == results[1]
            assert type(loop(Table(values, chosen, (2, 20)), words, weight, np.bool_(whole), out)[0]) is int


def test_what_is_returned(compiled: Callable[..., Any]) -> None:
    loop, divided, doubled = compiled(is_sorted), compiled(quotient), compiled(double)
    assert loop(np.array([1, 2, 2])) is True
    assert loop(np.array([1, 2, 1])) is False
    assert divided(-7, 2) == -4
    assert divided(-(1 << 63), 1) == -(1 << 63)
    values = np.array([1, -2])
    assert doubled(values) is None
    assert values.tolist() == [2, -4]


def test_what_cannot_be_passed_or_computed_is_an_error(compiled: Callable[..., Any]) -> None:
    divided, loop = compiled(quotient), compiled(is_sorted)
    with pytest.raises(ArithmeticError, match="quotient failed with status"):
        divided(1, 0)
    assert divided(1, 1) == 1
    for beyond in (1 << 63, -(1 << 63) - 1):
        with pytest.raises(OverflowError, match=f"{beyond} is beyond int64"):
            divided(beyond, 1)
    for value in ([1, 2], 1.5, None, np.float64(2)):
        with pytest.raises(TypeError, match="compiled loops take arrays, integers, truth values"):
            loop(value)


def test_shapes_alone_ask_for_no_other_code(compiled: Callable[..., Any]) -> None:
    """An array of one row, or of none, is contiguous in every sense; and whose memory it is does not matter."""
    loop = compiled(weigh)
    for rows in (4, 1, 0):
        values = np.arange(6 * rows).reshape(rows, 6)
        for own in (values, values.copy()):
            loop(Table(own, np.ones(6, np.bool_), (0, 9)), np.zeros(6, np.uint64), 1, True, np.zeros_like(values))
    assert len(loop._entries) == 1


def test_once_compiled_a_plan_needs_no_compiler() -> None:
    """Half of what a server did until its first batch was to load it."""
    code = (
        "import sys; from dataserver.planning.warmup import warm_up; warm_up(); warm_up();"
        "print(sorted({'numba', 'scipy'} & sys.modules.keys()))"
    )
    for _ in range(2):  # the first may have to compile
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
