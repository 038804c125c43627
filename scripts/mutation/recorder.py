"""A pytest plugin for a run under coverage: keeps apart which test ran which line, and how long each test took.

Lines of this process count for the running test; lines of processes that a test starts count for the test's file, since
tests share servers.
"""

import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

FILE_VARIABLE = "MUTATION_TEST_FILE"
"""Names the test file to coverage in the processes that tests start."""
TIMES_VARIABLE = "MUTATION_TIMES"
"""Names the file for the seconds of each test that passed."""

_seconds: dict[str, float] = defaultdict(float)
_failed: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note which test runs, for the lines that it covers."""
    running = coverage.Coverage.current()
    assert running is not None, "the recorder needs a process that coverage follows"
    running.switch_context(item.nodeid)
    os.environ[FILE_VARIABLE] = item.nodeid.partition("::")[0]
    try:
        return (yield)
    finally:
        running.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Sum up set-up, call and tear-down."""
    _seconds[report.nodeid] += report.duration
    if not report.passed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the seconds, once for all workers."""
    if not hasattr(session.config, "workerinput"):
        passed = {test: time for test, time in _seconds.items() if test not in _failed}
        Path(os.environ[TIMES_VARIABLE]).write_text(json.dumps(passed))
