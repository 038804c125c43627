"""A plugin of pytest that notes each test's outcome when it is known: one JSON line in the file `DISTTRAIN_CASES`."""

import json
import os
from pathlib import Path

import pytest

FILE = "DISTTRAIN_CASES"
SHOWN = 6000
"""Characters of what a failed test says, from its end."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what ends a test: its call, or what comes before it. Workers leave that to the process that started them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when == "call" or (report.when == "setup" and not report.passed):
        said = "" if report.passed else str(report.longrepr)[-SHOWN:]
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "said": said}
        with Path(os.environ[FILE]).open("a") as file:
            file.write(json.dumps(line) + "\n")
