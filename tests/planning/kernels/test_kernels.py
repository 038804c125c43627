"""Compiled kernels: the same results everywhere, loaded only where they are needed, cached, and said to be compiled."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core.errors import TypingError
from planning.kernels.golden_bins import digest

from dataserver.planning.kernels.compiler import kernel

ROOT = Path(__file__).parents[3]
GOLDEN = "ee10c0bdbbd639dd363267f523f1e62c2be77429a64acd0640c235bbef43a443"


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )


def test_golden_bins() -> None:
    assert digest() == GOLDEN


def test_compiled_and_interpreted_kernels_agree() -> None:
    """And so does another process: no result depends on hashing, on the compiler, or on integers that overflow."""
    program = Path(__file__).with_name("golden_bins.py")
    assert python(str(program), NUMBA_DISABLE_JIT="1", PYTHONHASHSEED="7").stdout.strip() == GOLDEN


def test_a_kernel_that_allocates_is_refused() -> None:
    """Numba counts references in kernels that may allocate, which made the one that scales images twice as slow."""

    @kernel
    def allocate(number: int) -> int:
        return len(np.empty(number, np.int64))

    with pytest.raises(TypingError, match="empty"):
        allocate(3)


def test_planner_modules_import_without_numba() -> None:
    code = (
        "import sys, dataserver.planning.planner, dataserver.planning.simulation, dataserver.planning.balancing;"
        "print('numba' in sys.modules)"
    )
    assert python("-c", code).stdout.strip() == "False"


def test_interpreted_kernels_leave_the_compiled_ones_where_they_are() -> None:
    code = (
        "from planning.kernels.interpreted import interpreted; read = interpreted('kernels.search');"
        "from dataserver.planning.kernels import search;"
        "print(hasattr(read._search, '__wrapped__'), hasattr(search._search, '__wrapped__'))"
    )
    assert python("-c", code, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}").stdout.strip() == "False True"
