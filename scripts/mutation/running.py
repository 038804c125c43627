"""Runs the tests of one mutant in a copy of the repository."""

import os
import re
import resource
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from mutation.covering import KERNELS, Covering
from mutation.effort import INTERVAL_S, MARK, Effort
from mutation.mutants import Mutant
from mutation.trees import Tree

MOST_TESTS = 400
"""Most tests that one mutant is given: what pytest does beside the tests themselves takes time, too."""
MOST_SECONDS = 60.0
"""Most seconds of computing and sleeping that all tests of one mutant but the first may take."""
PATIENCE = 90.0, 2.0
"""A mutant hangs that takes so many seconds, and so many times the seconds recorded, of computing and sleeping."""
MOST_BYTES = 16 << 30
"""Most address space that a mutant gets, for one that allocates without end."""
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
    effort: Effort


def judge(mutant: Mutant, tree: Tree, covering: Covering, stopping: Event) -> Verdict | None:
    """Put the mutant into the tree, run its tests until one fails, and take it out again; None if stopped before.

    Tests take less time than when coverage followed them on a busy machine. So where those pass that would have taken
    `MOST_SECONDS` then, as many run after them as time is left for at the pace that was seen.

    Raises:
        RuntimeError: if pytest did not run the tests.
    """
    waiting = covering.tests(mutant)
    if not waiting:
        return Verdict(mutant, False, "no test runs this line", Effort(""))
    path = tree.folder / mutant.path
    passed, effort = 0, Effort("")
    with tempfile.TemporaryDirectory() as compiled:
        # Elsewhere than the sound kernels: only the newest would be kept.
        folder = {"NUMBA_CACHE_DIR": compiled} if KERNELS in mutant.path else {}
        path.write_text(mutant.mutated)
        os.utime(path, (stamp := secrets.randbelow(1 << 31), stamp))  # bytecode of what was here before is not its own
        try:
            tests = _chosen(waiting, covering, MOST_TESTS, MOST_SECONDS) or waiting[:1]
            while tests:
                run, recorded_s = Effort(secrets.token_hex(8)), sum(map(covering.seconds, tests))
                environment = tree.environment(**folder, **{MARK: run.mark})
                most_s = PATIENCE[0] + PATIENCE[1] * recorded_s
                code, output = _run(tests, tree.folder, environment, run, most_s, stopping)
                effort = Effort("", effort.computed_s + run.computed_s, effort.asleep_s + run.asleep_s)
                if stopping.is_set():
                    return None
                if code != 0:
                    return Verdict(mutant, True, _killed_by(mutant, code, output), effort)
                passed, waiting = passed + len(tests), [test for test in waiting if test not in tests]
                pace = max(0.1, run.seconds / max(recorded_s, INTERVAL_S))
                tests = _chosen(waiting, covering, MOST_TESTS - passed, (MOST_SECONDS - effort.seconds) / pace)
        finally:
            path.write_text(mutant.source)
    return Verdict(mutant, False, f"{passed} tests passed", effort)


def _chosen(tests: list[str], covering: Covering, most: int, most_s: float) -> list[str]:
    """As many of the first tests as there are places and, as recorded, time for."""
    chosen: list[str] = []
    spent = 0.0
    for test in tests:
        seconds = covering.seconds(test)
        if len(chosen) < most and spent + seconds <= most_s:
            chosen.append(test)
            spent += seconds
    return chosen


def _killed_by(mutant: Mutant, code: int | None, output: str) -> str:
    """The test that failed, or how the run ended."""
    if code is not None and code >= 0 and code not in FAILED and NOT_LOADED not in output:
        raise RuntimeError(f"pytest ended with {code} for the mutant of {mutant.location}:\n{output[-3000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    ended = "hung" if code is None else f"ended with {code}"
    return failed[1] if failed else ended


def _run(
    tests: list[str], folder: Path, environment: dict[str, str], effort: Effort, most_s: float, stopping: Event
) -> tuple[int | None, str]:
    """The exit code, None of one that took too long or was stopped, and what was printed."""
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
        while (code := process.poll()) is None and effort.seconds < most_s and not stopping.wait(INTERVAL_S):
            effort.look()
        effort.end()
        process.wait()
        output.seek(0)
        return code, output.read()
