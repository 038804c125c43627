"""Processes that fork from one which has imported what they need, and commands as users run them in such processes.

A fork costs milliseconds, an interpreter with its imports one to eight seconds of a core.
"""

import contextlib
import gc
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import psutil

IMPORTED = [
    *(f"dataserver.cli.{command}" for command in ("index", "lint", "plan", "serve")),
    *(f"dataserver.planning.layouts.{kind}.layout" for kind in ("pipelined", "colocated", "grouped", "contrastive")),
    "torch._dynamo",  # the first optimizer would import it
    "trainclient.cli",
    "trainclient.training.control_channel",
    "trainclient.training.launch",
    "trainclient.training.worker",
]
RANK_NAME = "rank "
"""What the system calls a forked rank begins so, and ends with its number."""


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


class ForkedRun:
    """A command that goes on, whose stderr is a pipe: what tests of `subprocess.Popen` want of one.

    Its ranks are named `rank N` to the system (`/proc/PID/comm`): the variables that the system shows of a process are
    those of the one that it was forked from.
    """

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        """Start `trainclient ...` in a folder, with these variables alone."""
        context = forks()
        ours, theirs = context.Pipe(duplex=False)
        given = (list(words), folder, dict(environment), theirs)
        self._process = context.Process(target=_run_on, args=given)
        self._process.start()
        theirs.close()
        self.args = list(words)
        self.stderr: io.TextIOWrapper = os.fdopen(os.dup(ours.fileno()))
        ours.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[None, str]:
        """The rest of stderr. It ends with the last process that has it."""
        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(self.stderr.read)
            try:
                self.wait(timeout)
                return None, rest.result(timeout)
            except BaseException:  # as a test's timeout is
                self._kill_all()
                raise

    def _kill_all(self) -> None:
        """Kill all that have its stderr, ranks that a launcher left behind too: who reads it waits for every one."""
        self.kill()
        pipe = os.fstat(self.stderr.fileno())
        while found := [process for process in psutil.process_iter() if _has_stderr(process.pid, pipe)]:
            for process in found:  # one that forks may leave another, which the next round finds
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.01)


def _has_stderr(pid: int, pipe: os.stat_result) -> bool:
    try:
        return os.path.samestat(Path(f"/proc/{pid}/fd/2").stat(), pipe)
    except OSError:  # it has ended, or is another user's
        return False


def run_script(words: list[str], environment: Mapping[str, str], errors: Path) -> None:
    """Be the process of a script and its arguments: in the folder of the file that gets its stderr, with these
    variables alone. For a process that was forked."""
    gc.freeze()
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    os.chdir(errors.parent)
    _take(words, environment)
    runpy.run_path(words[0], run_name="__main__")


def _run_on(words: list[str], folder: Path, environment: Mapping[str, str], errors: Connection) -> None:
    gc.freeze()  # else every search for garbage goes through all that was imported, and copies its pages
    os.dup2(errors.fileno(), 2)
    errors.close()
    os.chdir(folder)
    _fork_ranks()
    _main(words, environment)


def _run(words: list[str], folder: Path, environment: Mapping[str, str], output: Sequence[Path]) -> None:
    gc.freeze()
    for number, path in enumerate(output, 1):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    if words[:2] == ["trainclient", "train"]:
        _fork_ranks()
    _main(words, environment)


def _take(words: list[str], environment: Mapping[str, str]) -> None:
    """Have the arguments and the variables of a process that was started with these."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words


def _main(words: list[str], environment: Mapping[str, str]) -> NoReturn:
    _take(words, environment)
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
            Path("/proc/self/comm").write_text(f"{RANK_NAME}{request[1]['RANK']}")
            _main(*request)
