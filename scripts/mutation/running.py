"""Runs the tests of one mutant in a copy of the repository."""

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mutation.covering import KERNELS, Covering
from mutation.mutants import Mutant
from mutation.trees import Tree

MOST_TESTS = 120
"""Of one mutant."""
MOST_SECONDS = 40.0
"""As recorded, of all tests of one mutant but the first."""
PATIENCE = 90.0, 6.0
"""A mutant that hangs is ended after so many seconds, and so many times the seconds recorded."""
MOST_BYTES = 16 << 30
"""Of address space, for a mutant that allocates without end."""
FAILED = {1, 2, 3}
"""pytest's exit codes where a test failed, a test could not be collected, or pytest itself broke."""
NOT_LOADED = "ImportError while loading conftest"
"""What pytest says, with the exit code of wrong arguments, where the mutant breaks what all tests import."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    killed: bool
    why: str
    """The test that failed, or how many there were."""
    seconds: float


def judge(mutant: Mutant, tree: Tree, covering: Covering) -> Verdict:
    """Put the mutant into the tree, run its tests until one fails, and take it out again.

    Raises:
        RuntimeError: if pytest did not run the tests.

    """
    began = time.monotonic()
    tests = _chosen(covering.tests(mutant), covering)
    if not tests:
        return Verdict(mutant, False, "no test runs this line", 0.0)
    path = tree.folder / mutant.path
    timeout_s = PATIENCE[0] + PATIENCE[1] * sum(map(covering.seconds, tests))
    with tempfile.TemporaryDirectory() as compiled:
        # Elsewhere than the sound kernels, of which only the newest would be kept.
        folder = {"NUMBA_CACHE_DIR": compiled} if KERNELS in mutant.path else {}
        path.write_text(mutant.mutated)
        try:
            code, output = _run(tests, tree.folder, tree.environment(**folder), timeout_s)
        finally:
            path.write_text(mutant.source)
    seconds = time.monotonic() - began
    if code == 0:
        return Verdict(mutant, False, f"{len(tests)} tests passed", seconds)
    if code is not None and code >= 0 and code not in FAILED and NOT_LOADED not in output:
        raise RuntimeError(f"pytest ended with {code} for the mutant of {mutant.place}:\n{output[-3000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    ended = "hung" if code is None else f"ended with {code}"
    return Verdict(mutant, True, failed[1] if failed else ended, seconds)


def _chosen(tests: list[str], covering: Covering) -> list[str]:
    """As many of the first tests as there are places and time for."""
    chosen: list[str] = []
    spent = 0.0
    for test in tests:
        seconds = covering.seconds(test)
        if len(chosen) < MOST_TESTS and (not chosen or spent + seconds <= MOST_SECONDS):
            chosen.append(test)
            spent += seconds
    return chosen


def _run(tests: list[str], folder: Path, environment: dict[str, str], timeout_s: float) -> tuple[int | None, str]:
    """The exit code, None after the timeout, and what was printed."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as names, tempfile.TemporaryFile("w+") as output:
        names.write("\n".join(tests))
        names.flush()
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "", "--tb=line"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, f"@{names.name}"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        resource.prlimit(process.pid, resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        output.seek(0)
        return code, output.read()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
