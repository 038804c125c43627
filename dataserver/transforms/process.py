"""A process that runs transforms of users (`worker`), and is killed at the deadline of a call with all it started."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataserver.process import children_of
from dataserver.transforms.errors import TransformError, TransformFailedError, TransformUnavailableError
from dataserver.transforms.installed import Installed

LOAD_S: Final = 60.0
"""Time to import a transform, also on a busy machine."""
MEMORY_BYTES: Final = 4 << 30
"""Most memory for the data of a process."""
_PROGRAM: Final = Path(__file__).with_name("worker.py")
_LINE_BYTES: Final = 1 << 16
_SPARE_BYTES: Final = 64 << 20
"""Memory that stays with a process between two calls; what a larger call took is given back."""
_ENVIRONMENT: Final = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ")
"""Variables that a transform sees; others may hold secrets."""


class Made(NamedTuple):
    """The pixels that a transform made."""

    data: NDArray[np.uint8]
    """The pixels as bytes, uint8 [bytes]."""
    cpu_ns: int
    """CPU time of the call in its process."""


class TransformProcess:
    """One process, for one call at a time. It may hold several transforms."""

    def __init__(self) -> None:
        """Start it. Raises TransformError where the system does not."""
        mine, theirs = socket.socketpair()
        memory = os.memfd_create("disttrain-transform", os.MFD_CLOEXEC)
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-s", str(_PROGRAM), str(theirs.fileno()), str(memory)],
                    env=environment | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a transform prints goes to the log
                    pass_fds=(theirs.fileno(), memory),
                    start_new_session=True,
                )
            except OSError as error:
                mine.close()
                os.close(memory)
                raise TransformError(f"cannot start the process that runs transforms: {error}") from error
        self.pid = process.pid
        self._connection, self._memory = mine, memory
        self._loaded: set[str] = set()
        self._close = weakref.finalize(self, _end, process, mine, memory)
        path = [str(Path(entry or ".").absolute()) for entry in sys.path]
        self._say({"path": path, "memory": MEMORY_BYTES})

    def load(self, installed: Installed) -> None:
        """Import a transform, where that is not done yet.

        Raises:
            TransformError: it cannot be imported, or is no function.
            TransformUnavailableError: that takes too long, or the process died.
        """
        if installed.value not in self._loaded:
            answer = self._answer(installed, {"kind": "load", "value": installed.value}, LOAD_S)
            if "unusable" in answer:
                raise TransformError(
                    f"the transform {installed} cannot be used: {_shown(answer['unusable'])}; mend its package"
                )
            self._loaded.add(installed.value)

    def call(
        self, installed: Installed, asked: Mapping[str, Any], data: bytes | memoryview, deadline_s: float, most: int
    ) -> Made:
        """Run a transform that is loaded.

        Args:
            installed: the transform.
            asked: what it is asked for beside its data.
            data: its data; of bytes, where it is a view.
            deadline_s: seconds until the process is killed.
            most: bytes that its result may have.

        Raises:
            TransformFailedError: it raised, or returned what it must not.
            TransformUnavailableError: it took too long, or had no memory, file or thread, or the process died. The
                process is over then.
        """
        try:
            self._write(data)
        except OSError as error:
            self.close()
            raise TransformUnavailableError(f"no memory to hand over to the transform {installed}: {error}") from error
        request = {**asked, "value": installed.value, "bytes": len(data)}
        answer = self._answer(installed, request, deadline_s)
        if answer.get("ends"):
            self.close()
        if "failed" in answer:
            raise TransformFailedError(f"the transform {installed} failed: {_shown(answer['failed'])}")
        if "machine" in answer:
            self.close()
            raise TransformUnavailableError(
                f"the transform {installed} could not run on this machine, where it may have {MEMORY_BYTES >> 20} MiB: "
                f"{_shown(answer['machine'])}; its process is replaced"
            )
        return Made(self._read(installed, answer.get("bytes"), most), answer.get("cpu_ns", 0))

    @property
    def is_over(self) -> bool:
        """Whether it can be asked no more."""
        return not self._close.alive

    def close(self) -> None:
        """Kill the process and all that it started."""
        self._close()

    def _say(self, line: Mapping[str, Any]) -> None:
        self._connection.sendall(json.dumps(line).encode() + b"\n")

    def _answer(self, installed: Installed, asked: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """The answer to a line. Kills the process and raises TransformUnavailableError where none comes in time."""
        until = time.monotonic() + deadline_s
        said = b""
        try:
            self._say({**asked, "deadline_s": deadline_s})
            while not said.endswith(b"\n"):
                self._connection.settimeout(max(until - time.monotonic(), 1e-3))
                piece = self._connection.recv(_LINE_BYTES)
                said += piece
                if not piece or len(said) > _LINE_BYTES:
                    raise ConnectionResetError
            self._connection.settimeout(None)
            found: dict[str, Any] = json.loads(said)
            if not isinstance(found, dict):
                raise ValueError("an object is required")
        except TimeoutError:
            self.close()
            raise TransformUnavailableError(
                f"the transform {installed} took more than {deadline_s:g} s and was killed; its process is replaced"
            ) from None
        except (OSError, ValueError):
            self.close()
            raise TransformUnavailableError(
                f"the process of the transform {installed} died, perhaps for lack of memory; it is replaced"
            ) from None
        return found

    def _write(self, data: bytes | memoryview) -> None:
        view, written = memoryview(data), 0
        while written < len(view):
            written += os.pwrite(self._memory, view[written:], written)

    def _read(self, installed: Installed, num_bytes: object, most: int) -> NDArray[np.uint8]:
        size = os.fstat(self._memory).st_size
        if not isinstance(num_bytes, int) or not 0 <= num_bytes <= min(most, size):
            self.close()
            raise TransformUnavailableError(
                f"the transform {installed} gave {num_bytes!r:.40} bytes, of {size} that are there; at most {most} are "
                "allowed; its process is replaced"
            )
        found = np.empty(num_bytes, np.uint8)
        read = 0
        while read < num_bytes:
            taken = os.preadv(self._memory, [found.data[read:]], read)
            if not taken:
                self.close()
                raise TransformUnavailableError(f"the transform {installed} cut its own memory; it is replaced")
            read += taken
        if num_bytes > _SPARE_BYTES:
            os.ftruncate(self._memory, 0)
        return found


def _shown(said: object) -> str:
    """What a transform says, for one line of a log."""
    text = str(said)[:500]
    return text if text.isprintable() else text.encode("unicode_escape", "backslashreplace").decode("ascii")


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket, memory: int) -> None:
    _kill_tree(process.pid)  # before it learns that nobody asks any more: what it started would have no parent then
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)  # and what it started before it died itself
    connection.close()
    os.close(memory)
    process.wait()


def _kill_tree(pid: int) -> None:
    """Kill a process that was not waited for, and all below it: stopped first, so that none starts another one."""
    with suppress(OSError):
        os.kill(pid, signal.SIGSTOP)
    for child in children_of(pid):
        _kill_tree(child)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
