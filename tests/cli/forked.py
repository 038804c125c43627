"""Processes that fork from one which has imported what they need, and commands as users run them in such processes.

A fork costs milliseconds, an interpreter with its imports one to eight seconds of a core.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, ClassVar, NoReturn

IMPORTED = [
    *(f"dataserver.cli.{command}" for command in ("index", "lint", "plan", "serve")),
    *(f"dataserver.planning.layouts.{kind}.layout" for kind in ("pipelined", "colocated", "grouped", "contrastive")),
    "torch._dynamo",  # the first optimizer would import it
    "trainclient.cli",
    "trainclient.training.control",
    "trainclient.training.launch",
    "trainclient.training.worker",
]


def forks() -> ForkServerContext:
    """Processes are made of it; whoever asks first starts the one that they fork from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def run_forked(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `dataserver ...` or `trainclient ...` in a folder, which gets its output, with these variables alone.

    The ranks that a trainer starts are forked as well.

    Raises:
        TimeoutError: it did not end in time.
    """
    output = [folder / "stdout", folder / "stderr"]
    process = forks().Process(target=_run, args=(list(words), folder, dict(environment), output))
    process.start()
    try:
        process.join(timeout_s)
        if process.exitcode is None:
            raise TimeoutError(f"{words} has not ended after {timeout_s} s: {[path.read_text() for path in output]}")
    finally:
        process.kill()
        process.join()
    return subprocess.CompletedProcess(words, process.exitcode, *(path.read_text() for path in output))


def _run(words: list[str], folder: Path, environment: Mapping[str, str], output: Sequence[Path]) -> None:
    for number, path in enumerate(output, 1):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    if words[:2] == ["trainclient", "train"]:
        _fork_ranks()
    _main(words, environment)


def _main(words: list[str], environment: Mapping[str, str]) -> NoReturn:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    sys.exit(import_module(f"{words[0]}.__main__").main())


class ForkedRank:
    """A process of a run for torch's launcher, which takes it for a `subprocess.Popen` of `python -m trainclient`."""

    requests: ClassVar[Connection]
    """To the process that all of them fork from."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], **options: Any) -> None:
        assert options == {"stdout": None, "stderr": None, "start_new_session": True}
        assert args[:2] == (sys.executable, "-m")
        self._words = list(args[2:])
        self.requests.send((self._words, dict(env)))
        self.pid: int = self.requests.recv()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.requests.send(self.pid)
            self.returncode = self.requests.recv()
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self._words, timeout)
            time.sleep(0.02)
        return code


def _fork_ranks() -> None:
    """Have ranks fork from a process that forks from this one now, before it has threads."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    ForkedRank.requests, theirs = multiprocessing.Pipe()
    if not os.fork():
        ForkedRank.requests.close()
        _answer(theirs)
    theirs.close()
    subprocess_handler.Popen = ForkedRank  # type: ignore[assignment,misc]


def _answer(requests: Connection) -> NoReturn:
    """Fork a process for a command line and its variables, and say what became of one, until nobody can ask."""
    while True:
        try:
            request = requests.recv()
        except EOFError:
            os._exit(0)
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            requests.send(os.waitstatus_to_exitcode(status) if pid else None)
        elif pid := os.fork():
            requests.send(pid)
        else:
            requests.close()
            os.setsid()
            _main(*request)
