"""The parent of several processes that serve one address: starts them, starts them again, and ends them together."""

import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from dataserver.serving.config import ServerConfig

SERVE: Final = (sys.executable, "-m", "dataserver", "serve", "--config", "/dev/stdin")
"""The command line of a process that is told what to serve."""
LISTENING: Final = "listening on "
"""Begins the line that a server prints when it serves."""
FIRST_PAUSE_S: Final = 1.0
"""Before a process that ended is started again. It doubles with each further end."""
MAX_PAUSE_S: Final = 30.0
STEADY_S: Final = 60.0
"""A process that ran for so long is started again as if it had never ended before."""

_log = logging.getLogger(__name__)


class Supervisor:
    """Keeps a process for each configuration. Thread-safe."""

    def __init__(
        self, configs: Sequence[ServerConfig], serving: Callable[[], object], ended: Callable[[], object]
    ) -> None:
        """Start all processes.

        Args:
            configs: one for each.
            serving: called once, from another thread, when all serve.
            ended: called once, from another thread, when all have ended and none is to be started again.
        """
        self._serving, self._ended = serving, ended
        self._changed = threading.Condition()
        """Guards the following."""
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._starting = set(range(len(configs)))
        """Those that have not served yet."""
        self._ending = False
        self.failed = False
        """Whether one ended before all served, so that all were ended."""
        self._keepers = [
            threading.Thread(target=self._keep, args=(number, config), name=f"worker {number}")
            for number, config in enumerate(configs)
        ]
        for keeper in self._keepers:
            keeper.start()
        threading.Thread(target=self._wait, name="ended").start()

    def end(self) -> None:
        """Tell all to end, as a signal tells a server: in order the first time, at once the second time."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
            for process in self._running.values():
                process.send_signal(signal.SIGTERM)

    def _keep(self, number: int, config: ServerConfig) -> None:
        """Keep one process running. This thread lives as long as it, which ends with its parent's thread."""
        pause, began = FIRST_PAUSE_S, monotonic()
        while True:
            try:
                ended = self._run(number, config)
            except OSError as error:  # such as a limit of processes
                ended = False, f"cannot be started ({error})"
            if ended is None:
                return
            ended_well, how = ended
            with self._changed:
                early = bool(self._starting) and not self._ending
                self.failed = self.failed or early
            if ended_well or early:  # it was drained, and the others with it; or it cannot serve
                self._end_others()
            if self._ending:
                return
            pause = FIRST_PAUSE_S if monotonic() - began > STEADY_S else pause
            _log.warning("worker %d %s; it is started again in %.0f s", number, how, pause)
            with self._changed:
                self._changed.wait_for(lambda: self._ending, pause)
            pause, began = min(2 * pause, MAX_PAUSE_S), monotonic()
            if config.worker is not None:
                config = config.model_copy(update={"worker": config.worker.model_copy(update={"again": True})})

    def _run(self, number: int, config: ServerConfig) -> tuple[bool, str] | None:
        """Run a process to its end: whether it ended well, and how; None where all are to end."""
        process = self._spawn(number, config)
        if process is None:
            return None
        self._follow(number, process)
        code = process.wait()
        with self._changed:
            del self._running[number]
        return code == 0, _how(code)

    def _spawn(self, number: int, config: ServerConfig) -> "subprocess.Popen[str] | None":
        """Start a process and tell it what to serve; None where all are to end."""
        places = [] if config.worker is None else [config.worker.places]
        line = [*SERVE, "--log-format", config.log_format]
        with self._changed:
            if self._ending:
                return None
            process = self._running[number] = subprocess.Popen(
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=places,
                start_new_session=True,  # Ctrl-C is for the parent, which tells its children
            )
        assert process.stdin is not None
        try:
            with process.stdin as stdin:
                stdin.write(json.dumps(config.model_dump(mode="json")))  # of any path, also of none that is UTF-8
        except BrokenPipeError:
            _log.debug("worker %d ended before it was told what to serve", number)
        return process

    def _follow(self, number: int, process: "subprocess.Popen[str]") -> None:
        """Read what a process prints until it ends."""
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                with self._changed:
                    first = number in self._starting and line.startswith(LISTENING)
                    self._starting -= {number} if first else set()
                    last = first and not self._starting
                if last:
                    self._serving()

    def _end_others(self) -> None:
        with self._changed:
            ending = self._ending
        if not ending:
            self.end()

    def _wait(self) -> None:
        for keeper in self._keepers:
            keeper.join()
        self._ended()


def _how(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
