"""Commands with a time limit, which end with all their processes."""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MARK: Final = "DISTTRAIN_BOUNDED_"
"""How the variable begins that all processes of a command have, whatever group or session they made for themselves."""
GRACE_S: Final = 5.0
"""Time for what a process does when it is asked to end."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and after how long."""

    code: int | None
    """Exit code; None if it had to be ended."""
    seconds: float
    log: Path
    """What it wrote, stderr included."""

    @property
    def how(self) -> str:
        """Say in words how it ended."""
        if self.code is None:
            return f"ended after its {self.seconds:.0f} s"
        return "done" if self.code == 0 else f"exit code {self.code}"

    def tail(self, lines: int) -> str:
        """The end of what it wrote."""
        found = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(line[-400:] for line in found)


def run_bounded(command: Sequence[Any], limit_s: float, log: Path, environment: Mapping[str, str]) -> Ended:
    """Run a command in a session of its own, and end all that is left of it, at the latest after `limit_s`.

    First its leader is asked, by SIGTERM; then all its processes are killed.
    """
    mark, began, code = MARK + uuid.uuid4().hex, time.monotonic(), None
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment, mark: "1"},
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        finally:
            _kill_all(f"{mark}=1".encode())
            process.wait()
    return Ended(code, time.monotonic() - began, log)


def _kill_all(mark: bytes) -> None:
    """Kill every process that has the variable, until none is left."""
    give_up = time.monotonic() + GRACE_S
    while found := list(_marked(mark)):
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > give_up:
            return  # one that waits for a device cannot be killed
        time.sleep(0.05)


def _marked(mark: bytes) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:  # it is gone, or another user's
            continue
        if mark in variables:
            yield int(path.parent.name)
