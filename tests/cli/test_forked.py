"""Runs that tests fork end in time, whoever still has their stderr."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from cli import forked

LONG_S = 30
"""Far beyond the timeouts, and less than a test may take: one that waits for it fails by itself."""


def launch(words: list[str], _folder: Path, _environment: Mapping[str, str], errors: Connection) -> None:
    """A launcher with a rank in a session of its own, which it leaves behind or waits for."""
    os.dup2(errors.fileno(), 2)
    errors.close()
    rank = subprocess.Popen([sys.executable, "-S", "-c", f"import time; time.sleep({LONG_S})"], start_new_session=True)
    os.write(2, b"started\n")
    if words == ["wait"]:
        rank.wait()
    os._exit(0)


@pytest.mark.parametrize("word", ["wait", "leave"])
def test_a_timeout_ends_a_run_whose_ranks_have_its_stderr(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "_run_on", launch)
    monkeypatch.setattr(forked, "forks", lambda: multiprocessing.get_context("spawn"))
    run = forked.ForkedRun([word], tmp_path, {})
    assert run.stderr.readline() == "started\n"
    if word == "leave":
        run.wait(LONG_S)
    begun = time.monotonic()
    with pytest.raises((subprocess.TimeoutExpired, TimeoutError)):
        run.communicate(0.3)
    assert time.monotonic() - begun < LONG_S / 2
    assert run.stderr.read() == "", "a process still has it"
    assert run.wait(LONG_S) == (0 if word == "leave" else -signal.SIGKILL)
