"""Processes of the demo: each a session of its own, all of them ended when the demo ends."""

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

START_S = 60.0
"""Time for a server to say where it listens."""
END_S = 20.0
"""Time for a process to end by itself after a signal."""


class CommandFailedError(Exception):
    """A command of the demo failed, and has said why on this terminal."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


class Processes:
    """Starts processes, and ends all that run when the block is left."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []
        self._logs: list[IO[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything, the trainers before the servers: they need them to finish the step in hand."""
        for process in reversed(self._running):
            # To the leader alone, which tells its children; SIGTERM, because Python answers SIGINT with a traceback.
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _signal_group(process, signal.SIGKILL)
                process.wait()
        for log in self._logs:
            log.close()

    def run(self, what: str, command: Sequence[Any]) -> None:
        """Run a command to its end on this terminal.

        Raises:
            CommandFailedError: it failed, with a message of its own.
            RuntimeError: a signal killed it.
        """
        process = self._start(command)
        code = process.wait()
        if code > 0:
            raise CommandFailedError(code)
        if code < 0:
            raise RuntimeError(f"{what} was killed by {signal.Signals(-code).name}; is there enough memory?")

    def serve(self, command: Sequence[Any], log_file: Path) -> str:
        """Start a data server and return the address it listens on.

        Raises:
            RuntimeError: it ended, or did not say in time where it listens.
        """
        log = log_file.open("w")
        self._logs.append(log)
        process = self._start(command, stdout=subprocess.PIPE, stderr=log)
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_read_lines, args=(process, lines), daemon=True).start()
        try:
            line = lines.get(timeout=START_S)
        except queue.Empty:
            line = ""
        if not line.startswith("listening on "):
            raise RuntimeError(f"a data server did not start; see {log_file}:\n{log_file.read_text()[-2000:]}")
        return line.removeprefix("listening on ").strip()

    def _start(self, command: Sequence[Any], **options: Any) -> subprocess.Popen[str]:
        arguments = [str(part) for part in command]
        process = subprocess.Popen(arguments, text=True, start_new_session=True, **options)
        self._running.append(process)
        return process


def _read_lines(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    """Pass lines on until the process closes its output, then an empty one."""
    if process.stdout is not None:
        for line in process.stdout:
            lines.put(line)
    lines.put("")


def _signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Signal a process with all its children; one that is gone is passed over."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
