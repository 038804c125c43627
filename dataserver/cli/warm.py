"""`dataserver warm`, and the compiling that other commands start."""

import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dataserver.planning.compiled import (
    COMPILING,
    folders,
    is_warm,
    mark_warm,
    place,
    taken,
    warm_folder,
)
from dataserver.planning.warmup import SHARES

_log = logging.getLogger(__name__)
_WAIT_S = 5
_GIVE_UP_S = 600
_POLL_S = 0.1
_LOCK = "warm.lock"
"""Of the one process that compiles everything."""
_COMPILED = re.compile(r"compiling (\S+) for the cache")
_CODE = (
    "import logging, sys; logging.basicConfig(level=logging.INFO, format='%(message)s');"
    "logging.getLogger('numba').setLevel(logging.WARNING);"
    "from dataserver.planning.warmup import warm_up; warm_up(int(sys.argv[1]));"
    "from dataserver.preprocessing import content_digest; content_digest()"  # compiles what scales images
)


def warm() -> None:
    """Compile the planner's loops for this processor, and say where they are kept.

    For images of machines and read-only installations: run it once where the files can be written. Servers and
    commands on such a machine then wait for no compiler. Does nothing that is already done.
    """
    began = time.monotonic()
    names = compile_all(lambda line: print(f"warm: {line}", file=sys.stderr, flush=True))
    for name in names:
        print(f"compiled {name}")
    where = warm_folder() or "no folder, since NUMBA_DISABLE_JIT is set"
    print(f"{len(names)} loops compiled in {time.monotonic() - began:.0f} s; they are kept in {where}")


def compile_all(say: Callable[[str], None]) -> list[str]:
    """Compile all kernels that are not compiled yet, or wait until another process has.

    Returns:
        The kernels that were compiled.

    Raises:
        ValueError: they can be kept nowhere; a process failed, with what it said last; or some are left.
    """
    if is_warm():
        return []
    folder = place()
    if folder is None:
        raise ValueError(
            f"the planner's compiled loops cannot be kept: none of {', '.join(map(str, folders()))} can be written; "
            "set NUMBA_CACHE_DIR to a folder that can"
        )
    with _turn(folder, say):
        return [] if is_warm() else _compiled(say)


def compile_behind() -> None:
    """Start `dataserver warm` as a process of its own, which outlives this one, if anything is left to compile."""
    folder = None if is_warm() else place()
    if folder is None:
        return
    with (folder / _LOCK).open("a") as lock:
        if not taken(lock.fileno()):
            return  # another process compiles
    nowhere = subprocess.DEVNULL
    line = [sys.executable, "-m", "dataserver", "warm"]
    subprocess.Popen(line, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)


@contextmanager
def _turn(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other process compiles everything, with a line every few seconds."""
    began, lines = time.monotonic(), 0
    with (folder / _LOCK).open("a") as lock:
        while not taken(lock.fileno()):
            passed = time.monotonic() - began
            if passed > _GIVE_UP_S:
                raise ValueError(f"another process has been compiling the planner's loops for {_GIVE_UP_S} s")
            if passed >= lines * _WAIT_S:
                lines += 1
                say(f"another process compiles the planner's loops, {passed:.0f} s")
            time.sleep(_POLL_S)
        yield


def _compiled(say: Callable[[str], None]) -> list[str]:
    """Compile in processes side by side: one process compiles one kernel at a time."""
    say(COMPILING)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _CODE, str(share)], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        for share in range(len(SHARES))
    ]
    began, said = time.monotonic(), []
    try:
        for process in running:
            said.append(_said(process, began, say))
    finally:
        for process in running:
            process.kill()
            process.wait()
    for process, text in zip(running, said, strict=True):
        if process.returncode:
            raise ValueError(f"compiling the planner's loops failed: {(text.splitlines() or ['no reason given'])[-1]}")
    from dataserver.planning.kernels import not_compiled

    if left := not_compiled():
        raise ValueError(f"compiling left out {', '.join(left)}, or they could not be kept in {place()}")
    mark_warm()
    return sorted({name for text in said for name in _COMPILED.findall(text)})


def _said(process: "subprocess.Popen[str]", began: float, say: Callable[[str], None]) -> str:
    """What a process has said when it has ended, with a line every few seconds until then."""
    while True:
        try:
            return process.communicate(timeout=_WAIT_S)[1]
        except subprocess.TimeoutExpired:
            passed = time.monotonic() - began
            if passed > _GIVE_UP_S:
                raise ValueError(f"compiling the planner's loops did not end within {_GIVE_UP_S} s") from None
            say(f"still compiling, {passed:.0f} s")
