"""`dataserver` as its users start it: another process."""

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.preforked import PreforkedProcess

from dataserver.cli import main

TIMEOUT_S = 60
SAYS = re.compile(
    r"(index|lint|convert|describe|plan|simulate|fit|towers|sizes|serve|ray|top|web|doctor|bench|warm|train|export): "
    r"|[-\d]+ [:,\d]+ INFO "
)
"""What a command is doing, and what it notes (files that are indexed as they are written may look younger than their
index); its refusal begins with `dataserver: `."""


def command(*arguments: str | Path) -> list[str]:
    """The command line of `python -m dataserver`."""
    return [sys.executable, "-m", "dataserver", *map(str, arguments)]


def dataserver(*arguments: str | Path) -> list[str]:
    """The words of such a command for a process that is forked."""
    return ["dataserver.__main__", *map(str, arguments)]


@dataclass
class Done:
    """A command that ended."""

    returncode: int
    stdout: str
    stderr: str

    def refusal(self) -> str:
        """The one line on stderr of a command that the user must put right."""
        assert self.returncode == 2, self
        assert "Traceback" not in self.stderr
        lines = [line for line in self.stderr.strip().splitlines() if not SAYS.match(line)]
        assert len(lines) == 1, lines
        return lines[0]


def spawn(*arguments: str | Path) -> Done:
    """Run a command to its end in another process, which is forked."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with PreforkedProcess(dataserver(*arguments), **pipes) as process:
        try:
            out, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    return Done(process.returncode, out, errors)


def run(*arguments: str | Path) -> Done:
    """Run a command to its end in this process."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # of the argument parser
            code = int(end.code or 0)
    return Done(code, out.getvalue(), errors.getvalue())


def refused(*arguments: str | Path) -> str:
    """The one line on stderr of a command, run in this process, that the user must put right."""
    return run(*arguments).refusal()


@dataclass
class ServerProcess:
    """A server that listens."""

    process: subprocess.Popen[str]
    address: str

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal and wait for the end; exit code and stderr."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, errors


@contextmanager
def serving(*arguments: str | Path, by_hand: bool = False) -> Iterator[ServerProcess]:
    """Start `dataserver serve` on a free port and wait until it listens.

    Args:
        arguments: further ones.
        by_hand: start an interpreter, as users do; else the process forks from one that has imported everything. It
            has a seed of hashes of its own, which all that are forked share.
    """
    words = ["serve", "--listen", "127.0.0.1:0", *map(str, arguments)]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    streams["env"] = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if by_hand:
        streams["env"]["PYTHONHASHSEED"] = "1"
    started = (
        subprocess.Popen(command(*words), **streams) if by_hand else PreforkedProcess(dataserver(*words), **streams)
    )
    with started as process:
        try:
            assert process.stdout is not None
            found = re.fullmatch(r"listening on ([\d.]+:\d+)\n", process.stdout.readline())
            assert found, process.stderr.read() if process.stderr else ""
            yield ServerProcess(process, found[1])
        finally:
            if process.poll() is None:
                process.kill()
