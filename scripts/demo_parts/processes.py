"""Processes of the demo: each leads a group of its own with a log, all of them ended when the demo ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

START_S = 300.0
"""Time for a server to say where it listens: on a busy machine without caches it loads its libraries for a minute."""
END_S = 20.0
"""Time for a process to end by itself after a signal."""
POLL_S = 0.1
LAST_LINES = 12
"""Lines of a log that are shown when its process has failed."""
_LISTENING = "listening on "


class FailedError(Exception):
    """A process of the demo failed; the message shows the end of its log."""

    def __init__(self, child: "Child", what: str) -> None:
        self.code = max(1, child.process.poll() or 1)
        lines = child.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        shown = "".join(f"    {line}\n" for line in lines) or "    (nothing)\n"
        super().__init__(f"{child.name} {what}. The end of {child.log}:\n{shown}".rstrip())


class Child:
    """A process that was started, and what it writes."""

    def __init__(self, name: str, command: Sequence[Any], log: Path, environment: Mapping[str, str]) -> None:
        """Start a process whose output, stderr included, goes to `log`."""
        self.name = name
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                process_group=0,  # not a session: the system would schedule each as a group of its own
            )
        self._read = 0

    def lines(self) -> Iterator[str]:
        """The whole lines that it has written since the last call."""
        with self.log.open("rb") as output:
            output.seek(self._read)
            for line in output:
                if line.endswith(b"\n"):
                    self._read += len(line)
                    yield line.decode(errors="replace").rstrip()


class Processes:
    """Starts processes, and ends all that run when the block is left."""

    def __init__(
        self, logs: Path, tick: Callable[[], None] = lambda: None, check: Callable[[], None] = lambda: None
    ) -> None:
        """Keep logs in a folder that exists.

        Args:
            logs: the folder.
            tick: called often while something is waited for.
            check: called as often, except while processes end; raises what ends the wait.
        """
        self._logs = logs
        self._tick = tick
        self._check = check
        self._running: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End everything, the trainers before the servers: they need them to finish the step in hand."""
        for process in (child.process for child in reversed(self._running)):
            # To the leader alone, which tells its children; SIGTERM, because Python answers SIGINT with a traceback.
            process.terminate()
            give_up = time.monotonic() + END_S
            while process.poll() is None and time.monotonic() < give_up:
                self._pause()
            _kill_group(process.pid)
            process.wait()

    def start(self, name: str, command: Sequence[Any], environment: Mapping[str, str] | None = None) -> Child:
        """Start a command; its log is named after it."""
        child = Child(name, command, self._logs / f"{name.replace(' ', '-')}.log", environment or {})
        self._running.append(child)
        return child

    def run(self, children: Sequence[Child], say: Callable[[str], None]) -> None:
        """Wait until all these have ended well, and hand on the lines of the first.

        Raises:
            FailedError: one of them failed.
        """
        left = list(children)
        while left:
            self._check()
            self._pause()
            for line in children[0].lines():
                say(line)
            for child in [c for c in left if c.process.poll() is not None]:
                _require_success(child)
                left.remove(child)
        for line in children[0].lines():
            say(line)

    def indexed_pairs(self, shards: Path, *options: Any) -> None:
        """Make shards of image-text pairs with options of `make_demo_shards.py`, and index them."""
        self.make_pairs(shards, *options)
        self.index(shards)

    def make_pairs(self, shards: Path, *options: Any) -> None:
        """Make shards of image-text pairs with options of `make_demo_shards.py`."""
        self.run([self.start("making shards", python("make_demo_shards.py", shards, *options))], print)

    def index(self, shards: Path | str) -> None:
        """Index the shards of a folder, or at a URL."""
        self.run([self.start("indexing", [sys.executable, "-m", "dataserver", "index", shards])], print)

    def serve_pairs(self, shards: Path | str, *flags: Any, name: str = "server") -> str:
        """Serve such shards on a free port as the dataset `pairs`; the address."""
        dataset = ["--dataset", f"pairs={shards}"]
        serve = [sys.executable, "-m", "dataserver", "serve", "--listen", "127.0.0.1:0", *dataset, *flags]
        return self.address(self.start(name, serve))

    def address(self, server: Child) -> str:
        """Wait until a server says where it listens.

        Raises:
            FailedError: it ended, or did not say so in time.
        """
        give_up = time.monotonic() + START_S
        while True:
            ended, late = server.process.poll() is not None, time.monotonic() > give_up
            for line in server.lines():
                if line.startswith(_LISTENING):
                    return line.removeprefix(_LISTENING)
            if ended:
                raise FailedError(server, _how(server))
            if late:
                raise FailedError(server, f"did not start within {START_S:.0f} s")
            self._check()
            self._pause()

    def _pause(self) -> None:
        self._tick()
        time.sleep(POLL_S)


def python(script: str, *arguments: Any) -> list[Any]:
    """The command that runs a script of `scripts` or of `scripts/fixtures`, by its name."""
    scripts = Path(__file__).parents[1]
    found = scripts / script if (scripts / script).exists() else scripts / "fixtures" / script
    return [sys.executable, found, *arguments]


def _require_success(child: Child) -> None:
    if child.process.returncode:
        raise FailedError(child, _how(child))


def _how(child: Child) -> str:
    code = child.process.returncode
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _kill_group(leader: int) -> None:
    """Kill a process with all its children; where none is left, there is nothing to do."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return
