"""`dataserver` and other programs in processes that fork from one which has imported what they need.

To the test each is a `subprocess.Popen` like another. A fork costs milliseconds, an interpreter that imports what a
server does a second of a core, and a server's first plan as much again, for which compiled kernels are loaded.
"""

import atexit
import contextlib
import gc
import io
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

TESTS = Path(__file__).resolve().parents[1]
PATH = [str(TESTS), str(TESTS.parent), str(TESTS.parent / "protos")]
COMMANDS = ("index", "lint", "plan", "serve")
_lock = threading.Lock()
_mother: "tuple[subprocess.Popen[bytes], socket.socket] | None" = None


class PreforkedProcess(subprocess.Popen[str]):
    """A process whose words are a module and its arguments: it calls the `main` of that module.

    It has the variables of this process but for `env`, and the folder `cwd`. Other options of `Popen` than these, its
    streams and `text` are ignored.
    """

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:  # as Popen calls it
        folder, variables = rest[4], rest[5]
        pipes = rest[9:15]  # of each stream the child's end and ours, or ours and the child's
        theirs = [end if end >= 0 else number for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        asked = {"words": list(args), "folder": str(folder or Path.cwd()), "variables": dict(variables or os.environ)}
        try:
            self.pid = _ask(asked, theirs)[0]
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        return super()._internal_poll(_deadstate, _waitpid=lambda _pid, flags: self._try_wait(flags))  # type: ignore[misc]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if not wait_flags:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(self.pid)
                select.select([pidfd], [], [])
                os.close(pidfd)
        pid, status = _ask({"wait": self.pid}, [])
        return pid, status


def _ask(asked: dict[str, Any], descriptors: Sequence[int]) -> list[int]:
    """The answer of the process that the others fork from; it is started if there is none."""
    global _mother
    with _lock:
        if _mother is None:
            ours, theirs = socket.socketpair()
            path = os.pathsep.join([*PATH, os.environ.get("PYTHONPATH", "")])
            with theirs:
                line = [sys.executable, __file__]
                process = subprocess.Popen(
                    line, stdin=theirs, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
                )
            _mother = process, ours
            atexit.unregister(_end)
            atexit.register(_end)
        process, requests = _mother
        try:
            return _answer(requests, json.dumps(asked).encode(), descriptors)
        except BaseException:  # a test's timeout too: the next test would read the answer to this one
            _mother = None
            requests.close()
            process.kill()
            process.wait()
            raise


def _answer(requests: socket.socket, text: bytes, descriptors: Sequence[int]) -> list[int]:
    size = len(text).to_bytes(4, "little")
    if descriptors:
        socket.send_fds(requests, [size], descriptors)
    else:
        requests.sendall(size)
    requests.sendall(text)
    answer: list[int] = json.loads(_exactly(requests, int.from_bytes(_exactly(requests, 4), "little")))
    return answer


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = connection.recv(size - len(found))
        if not piece:
            raise ConnectionError("the process that others fork from has ended")
        found += piece
    return found


def _end() -> None:
    if _mother is not None:
        process, requests = _mother
        requests.close()
        process.wait()


def waited(pid: int) -> list[int]:
    """The process and its status, or zeros while it runs: as `subprocess` takes it.

    A process that another one forked, which has ended, is not a child of this one: its status is lost, and 0 here. It
    has ended too where nobody reaps it, as in a container whose first process does not.
    """
    try:
        return list(os.waitpid(pid, os.WNOHANG))
    except ChildProcessError:
        return [0 if _runs(pid) else pid, 0]


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(") ")[2][0] not in "ZX"  # behind the name, which may hold anything


def main() -> None:
    """Fork a process for each line of words, and say how those have ended that are asked after."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # as dataserver has it, before gRPC is loaded
    from dataserver.cli.warm import warm_up

    for name in COMMANDS:
        import_module(f"dataserver.cli.{name}")
    warm_up()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=sys.stdin.fileno()) as requests:
        while True:
            head, descriptors, *_ = socket.recv_fds(requests, 4, 3)
            if not head:
                return
            asked = json.loads(_exactly(requests, int.from_bytes(head, "little")))
            if "wait" in asked:
                found = waited(asked["wait"])
            elif pid := os.fork():
                found = [pid]
            else:
                requests.detach()
                _be(asked, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            answer = json.dumps(found).encode()
            requests.sendall(len(answer).to_bytes(4, "little") + answer)


def _be(asked: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Be a program, as an interpreter of its own would be."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(asked["variables"])
    os.chdir(asked["folder"])
    sys.argv = asked["words"]
    at_once = "PYTHONUNBUFFERED" in os.environ
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    output = open(1, "wb", 0 if at_once else -1, closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(output, write_through=at_once)
    errors = io.TextIOWrapper(open(2, "wb", closefd=False), errors="backslashreplace", line_buffering=True)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = errors
    status: Any = 1
    try:
        status = import_module(sys.argv[0]).main()
    except SystemExit as end:
        status = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    main()
