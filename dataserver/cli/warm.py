"""`dataserver warm`, and the compiling that other commands start."""

import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable

from dataserver.planning.compiled import COMPILING, folders, is_warm, mark_warm, place
from dataserver.planning.warmup import SHARES

_log = logging.getLogger(__name__)
_WAIT_S = 5
_GIVE_UP_S = 600
_COMPILED = re.compile(r"compiling (\S+) for the cache")
_CODE = (
    "import logging, sys; logging.basicConfig(level=logging.INFO, format='%(message)s');"
    "logging.getLogger('numba').setLevel(logging.WARNING);"
    "from dataserver.planning.warmup import warm_up; warm_up(int(sys.argv[1]))"
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
    where = next(folder for folder in folders() if folder.exists())
    print(f"{len(names)} loops compiled in {time.monotonic() - began:.0f} s; they are kept in {where}")


def compile_all(say: Callable[[str], None]) -> list[str]:
    """Compile all kernels that are not compiled yet, in processes side by side: one process compiles one at a time.

    Returns:
        The kernels that were compiled.

    Raises:
        ValueError: they can be kept nowhere; or a process failed, with what it said last.
    """
    if is_warm():
        return []
    if place() is None:
        raise ValueError(
            f"the planner's compiled loops cannot be kept: none of {', '.join(map(str, folders()))} can be written; "
            "set NUMBA_CACHE_DIR to a folder that can"
        )
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
    mark_warm()
    return sorted({name for text in said for name in _COMPILED.findall(text)})


def compile_behind() -> None:
    """Start `dataserver warm` as a process of its own, which outlives this one, if anything is left to compile."""
    if not is_warm() and place() is not None:
        nowhere = subprocess.DEVNULL
        line = [sys.executable, "-m", "dataserver", "warm"]
        subprocess.Popen(line, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)


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
