"""Where the compiled loops are kept, and whether all of them are there; without importing numba.

A folder's name is a digest of all that decides about machine code: the sources of all kernels (one may be part of
another), the versions of numba, llvmlite and Python, and the processor. So a changed kernel, and an image that moves to
another kind of machine, find nothing stale. Loops are read from all places and written to the first that is writable.
"""

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

COMPILING = "compiling the planner's loops for this processor, once (up to 20 s)"
"""What people read while they wait for it."""
KEPT = 8
"""Folders of other sources or processors that stay beside a new one."""
_KERNELS = Path(__file__).with_name("kernels")
_WARM = "warm"
"""Name of the file that says that nothing is left to compile."""


def folders() -> list[Path]:
    """Where compiled loops may lie, the first choice first.

    NUMBA_CACHE_DIR alone if it is set; else beside the sources, then in the user's cache directory.
    """
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(named) / _name()]
    beside = _KERNELS / "__pycache__" / _name()
    try:
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    except RuntimeError:  # a container's user may have no home
        return [beside]
    return [beside, user / "disttrain" / _name()]


def interpreted() -> bool:
    """Whether the loops run as they are written, for tests and debuggers."""
    return os.environ.get("NUMBA_DISABLE_JIT", "0") != "0"


def is_warm() -> bool:
    """Whether nothing is left to compile."""
    return interpreted() or warm_folder() is not None


def warm_folder() -> Path | None:
    """The folder in which a warm-up has left nothing to compile, or None."""
    return next((folder for folder in folders() if (folder / _WARM).exists()), None)


def place() -> Path | None:
    """The folder that compiled loops are written to, or None where none can be."""
    return next((folder for folder in folders() if made(folder) and os.access(folder, os.W_OK)), None)


def mark_warm() -> None:
    """Note that nothing is left to compile."""
    if (folder := place()) is not None:
        (folder / _WARM).touch()


def taken(lock: int) -> bool:
    """Take the lock of an open file, if no other process has it. Where a file system has no locks, all take it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def made(folder: Path) -> bool:
    """Make a folder for compiled loops, and remove the oldest of its kind; False if it cannot be made."""
    if folder.exists():
        return True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = sorted(folder.parent.glob("kernels-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return False
    for old in [other for other in others if other != folder][KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    return True


@functools.cache
def _name() -> str:
    found = hashlib.sha256()
    for source in sorted(_KERNELS.glob("*.py")):
        found.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    about = [version("numba"), version("llvmlite"), sys.version, *_processor()]
    found.update("\0".join(about).encode())
    return f"kernels-{found.hexdigest()[:16]}"


def _processor() -> list[str]:
    """What the compiler may make use of."""
    chosen = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NUMBA_CPU")]
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return [platform.machine(), platform.processor(), *chosen]
    wanted = ("model name", "flags", "Features", "CPU part")
    return [platform.machine(), *sorted({line for line in lines if line.startswith(wanted)}), *chosen]
