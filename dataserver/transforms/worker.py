"""The process that runs transforms of users: `python -P -s worker.py SOCKET MEMORY`, two descriptors.

It imports nothing of ours. Lines of JSON go over the socket, and what they are about lies in the memory. The first line
says where packages are and how much memory there may be. Each further one asks to load an entry point, or to call it;
the answer is {"bytes": ..., "cpu_ns": ...}, {"failed": why}, {"unusable": why} or {"machine": why}.

An array that a transform gets is its own copy, so whatever still writes to it changes no other image. The process ends
with the one that started it; in the middle of a call, the system ends it a little after its deadline.
"""

import ctypes
import importlib
import json
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
MARGIN_S = 5
"""After its deadline the process that asks ends this one; a little later the system does, if that one is gone."""
NO_THREAD = "can't start new thread"
"""What a RuntimeError says where the system gives no more threads."""


class MisfitError(Exception):
    """What a transform returned is not what it must return."""


def _pixels(transform: Callable[..., Any], asked: dict[str, Any], memory: int) -> Any:
    import numpy as np

    pixels = np.empty(asked["shape"], np.uint8)
    _fill(pixels.data.cast("B"), memory)
    made = transform(pixels, tuple(asked["words"]), asked["options"])
    if not isinstance(made, np.ndarray) or made.dtype != np.uint8 or list(made.shape) != asked["shape"]:
        found = f"{made.dtype} {list(made.shape)}" if isinstance(made, np.ndarray) else type(made).__name__
        raise MisfitError(f"it returned {found}; an array uint8 {asked['shape']} is required, as it was given")
    return np.ascontiguousarray(made)


def _text(transform: Callable[..., Any], asked: dict[str, Any], memory: int) -> Any:
    made: list[list[str | None]] = []
    for text in json.loads(_handed_over(asked, memory)):
        try:
            found = transform(text, dict(asked["options"]))
            if not isinstance(found, str):
                raise MisfitError(f"it returned {type(found).__name__}; a text is required")
            found.encode()
            if not found.strip():
                raise MisfitError("it returned an empty text; leave the sample out by a filter")
            made.append([found])
        except BaseException as error:  # one text says nothing about the others
            if _is_of_machine(error):
                raise
            made.append([None, _reason(error)])
    return json.dumps(made).encode()


def _metadata(transform: Callable[..., Any], asked: dict[str, Any], memory: int) -> Any:
    import pyarrow as pa

    table = pa.ipc.open_stream(pa.py_buffer(_handed_over(asked, memory))).read_all()
    made = transform(table, asked["options"])
    if not isinstance(made, pa.Table) or made.num_rows != table.num_rows:
        found = f"a table of {made.num_rows} rows" if isinstance(made, pa.Table) else type(made).__name__
        raise MisfitError(f"it returned {found}; a table of {table.num_rows} rows is required, one for each sample")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, made.schema) as writer:
        writer.write_table(made)
    return sink.getvalue()


def _nothing(_transform: object, asked: dict[str, Any], memory: int) -> Any:
    """Hand back what was handed over, which shows what that costs."""
    return _handed_over(asked, memory)


def _handed_over(asked: dict[str, Any], memory: int) -> bytearray:
    found = bytearray(asked["bytes"])
    _fill(memoryview(found), memory)
    return found


def _fill(view: memoryview, memory: int) -> None:
    """Read the memory from its beginning, in as many calls as it takes: one reads 2 GiB at most."""
    read = 0
    while read < len(view):
        taken = os.preadv(memory, [view[read:]], read)
        if not taken:
            raise OSError("the memory has fewer bytes than were handed over")
        read += taken


CALLS = {"pixels": _pixels, "text": _text, "metadata": _metadata, "nothing": _nothing}


def _reason(error: BaseException) -> str:
    try:
        said = str(error)
    except BaseException:
        said = "(its message raises an error as well)"
    return (said if isinstance(error, MisfitError) else f"it raised {type(error).__name__}: {said}")[:500]


def _is_of_machine(error: BaseException) -> bool:
    """Whether another machine, or this one a little later, may do better."""
    return isinstance(error, MemoryError | OSError) or (isinstance(error, RuntimeError) and NO_THREAD in _reason(error))


def _started_processes() -> bool:
    """Whether processes are left that the last call started, or that such a process left behind."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _load(loaded: dict[str, Any], value: str) -> dict[str, Any]:
    module, _, attributes = value.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for attribute in filter(None, attributes.split(".")):
            found = getattr(found, attribute)
    except BaseException as error:  # whatever a package raises while it is imported, sys.exit() as well
        return {"unusable": _reason(error).removeprefix("it raised ")}
    if not callable(found):
        return {"unusable": f"{value} is a {type(found).__name__}; a function is required"}
    loaded[value] = found
    return {"bytes": 0, "cpu_ns": 0}


def _call(loaded: dict[str, Any], asked: dict[str, Any], memory: int) -> dict[str, Any]:
    began = time.process_time_ns()
    try:
        data = CALLS[asked["kind"]](loaded[asked["value"]], asked, memory)
    except BaseException as error:  # whatever a transform raises is its answer, sys.exit() as well
        return {"machine" if _is_of_machine(error) else "failed": _reason(error)}
    if _started_processes():
        return {"failed": "it started a process and did not wait for its end", "ends": True}
    view = memoryview(data).cast("B")
    written = 0
    while written < len(view):
        written += os.pwrite(memory, view[written:], written)
    return {"bytes": len(view), "cpu_ns": time.process_time_ns() - began}


def main() -> None:
    """Answer every line until the other end of the socket is closed."""
    connection, memory, own = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), os.getpid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    loaded: dict[str, Any] = {}
    with connection, connection.makefile("rb") as lines:
        first = json.loads(lines.readline())
        sys.path[:] = first["path"]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (first["memory"], first["memory"]))
        for line in lines:
            asked = json.loads(line)
            signal.alarm(math.ceil(asked["deadline_s"]) + MARGIN_S)
            answer = _load(loaded, asked["value"]) if asked["kind"] == "load" else _call(loaded, asked, memory)
            signal.alarm(0)
            if os.getpid() != own:  # a transform forked, and this is what it made
                os._exit(0)
            connection.sendall(json.dumps(answer).encode() + b"\n")
    os.killpg(0, signal.SIGKILL)  # what transforms started must not outlive the process that asked


if __name__ == "__main__":
    main()
