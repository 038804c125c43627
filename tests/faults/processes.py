"""Servers that are killed, stopped, drained and started again, each at one address."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cli.preforked import PreforkedProcess
from cli.server_process import TIMEOUT_S, command, dataserver
from ports import free_addresses


@contextmanager
def stopped(process: "subprocess.Popen[str]") -> Iterator[None]:
    """Hold a process still: its kernel goes on to take connections and bytes, and nobody answers."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


class Member:
    """A server of a fleet, as its users start it; it keeps its address through all its processes."""

    def __init__(
        self,
        flags: Sequence[str | Path],
        log: Path,
        *,
        listen: str | None = None,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            flags: of `dataserver serve`.
            log: file that takes its stderr; a pipe that nobody reads would hold a server up.
            listen: its address; a free one of the loopback device unless given.
            prefix: what to put before its command line.
            environment: variables that differ from this process's.
        """
        self._flags = flags
        self._prefix = prefix
        self._environment = environment or {}
        self.log = log
        self.process, self.address = self._started(listen or free_addresses(1)[0])

    def kill(self) -> None:
        """End it without a word."""
        self.process.send_signal(signal.SIGKILL)
        self.wait()

    def drain(self) -> None:
        """Have it end in order, for which it waits for its clients."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for its end; the exit code."""
        code = self.process.wait(TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def start(self, environment: Mapping[str, str] | None = None) -> None:
        """Start it again where it was, with other variables if they are given."""
        self._environment = self._environment if environment is None else environment
        self.process, _ = self._started(self.address)

    def close(self) -> None:
        """End it, in whatever state it is."""
        if self.process.poll() is None:
            self.kill()

    def _started(self, listen: str) -> "tuple[subprocess.Popen[str], str]":
        words = ["serve", "--listen", listen, *self._flags]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
        options["env"] = {**os.environ, "PYTHONUNBUFFERED": "1", **self._environment}
        with self.log.open("a") as log:
            if self._prefix or self._environment:  # which may preload a library
                process = subprocess.Popen([*self._prefix, *command(*words)], stderr=log, **options)
            else:
                process = PreforkedProcess(dataserver(*words), stderr=log, **options)
        assert process.stdout is not None
        found = re.fullmatch(r"listening on (\S+:\d+)\n", process.stdout.readline())
        if found is None:
            process.kill()
            process.wait()
            raise AssertionError(self.log.read_text())
        return process, found[1]
