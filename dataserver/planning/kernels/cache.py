"""The folder of compiled kernels. Imports no numba.

Its name is a digest of all that decides about machine code and that numba's own cache does not look at: the sources of
all kernels, since one calls parts of others, and the versions of numba, llvmlite and Python, and the processor. Numba
unpickles what lies there. So a folder is used only if it belongs to this user or root, and nobody else may write to it.
"""

import atexit
import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

COMPILING: Final = "compiling the kernels for this processor, once (up to a minute)"
"""What people read while they wait for it."""
_PACKAGE: Final = Path(__file__).parents[2]
_COMPLETE: Final = f"complete-{hashlib.sha256(str(_PACKAGE).encode()).hexdigest()[:8]}"
"""Name of the file that says that a warm-up has compiled all kernels. Numba keeps those of each installation apart."""
_LOCK: Final = "lock"
_PATIENCE_S: Final = 60
"""How long a process waits for another one that compiles. Then it compiles too."""
_POLL_S: Final = 0.05
_OTHERS: Final = 8
"""Folders of other sources, versions or processors that stay beside a new one."""
_log = logging.getLogger(__name__)
_named: Path | None = None


def use(cache_dir: Path | None) -> None:
    """Name the folder that holds the cache, before any kernel is imported. Where none is named it is the user's."""
    global _named
    _named = cache_dir


@functools.cache
def folder() -> Path | None:
    """The folder that compiled kernels are loaded from and written to, or None where there is none.

    It is the first that can be written: in NUMBA_CACHE_DIR, if that is set, then in the folder that was named, or in
    the user's cache. What lies in an earlier one, as it may ship with an image, is copied to it.
    """
    shipped: Path | None = None
    for parent in _parents():
        found = parent / _name()
        if _is_writable(found):
            if shipped is not None:
                _copy(shipped, found)
            return found
        if shipped is None and _is_trusted(found):
            shipped = found
    if shipped is None:
        return None
    import tempfile

    with contextlib.suppress(OSError):
        copy = Path(tempfile.mkdtemp(prefix="disttrain-"))
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        _copy(shipped, copy)
        return copy
    return None


def tried() -> str:
    """The folders that a cache could lie in, for messages."""
    return " and ".join(map(str, _parents())) or "a user without a home has no cache, which"


def is_complete() -> bool:
    """Whether nothing is left to compile, as where kernels run as they are written, for debuggers."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return True
    found = folder()
    return found is not None and os.path.exists(found / _COMPLETE)  # noqa: PTH110  a disk that fails has none


def set_complete() -> None:
    """Note that nothing is left to compile."""
    if (found := folder()) is not None:
        with contextlib.suppress(OSError):
            (found / _COMPLETE).touch()


def clear() -> None:
    """Remove all compiled kernels from the folder, and leave the folder itself."""
    if (found := folder()) is not None:
        for path in found.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
        (found / _COMPLETE).unlink(missing_ok=True)


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Wait until no other process compiles, but not for ever.

    Numba's index of a kernel is wrong after two processes have added to it at once.
    """
    found = folder()
    if found is None or is_complete():
        yield
        return
    try:
        lock = os.open(found / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError:
        yield
        return
    try:
        give_up = time.monotonic() + _PATIENCE_S
        while not _taken(lock) and time.monotonic() < give_up:
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(lock)


def user_cache() -> Path | None:
    """The folder for caches of this user, or None where a container's user has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "disttrain"
    except RuntimeError:
        return None


def _parents() -> list[Path]:
    named = os.environ.get("NUMBA_CACHE_DIR")
    return [path for path in (Path(named) if named else None, _named or user_cache()) if path is not None]


def _is_writable(found: Path) -> bool:
    """Whether the folder is there, or can be made, and may be written to."""
    try:
        if not found.exists():
            found.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            found.mkdir(mode=0o700, exist_ok=True)
            _remove_old(found)
    except OSError:
        return False
    return _is_trusted(found) and os.access(found, os.W_OK | os.X_OK)


def _is_trusted(found: Path) -> bool:
    """Whether the folder belongs to this user or root, and nobody else may write to it, put another one there, or write
    to anything in it."""
    try:
        top, above = found.lstat(), found.parent.stat()
        inner = found.rglob("*") if top.st_mode & 0o077 else ()  # else nobody else gets into it
        bad = [path for path in (found, *inner) if not is_ours(path.lstat())]
        if not (is_ours(above) or above.st_mode & stat.S_ISVTX):  # as of /tmp: only owners rename
            bad.append(found.parent)
    except OSError:
        return False
    if bad:
        _log.warning(
            "compiled kernels are not taken from %s: others may write to %s. Permit only its owner to write to it "
            "(chmod go-w), or name another folder with --cache-dir",
            found,
            bad[0],
        )
    return not bad


def is_ours(about: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user or root, and nobody else may write to it."""
    return about.st_uid in (0, os.geteuid()) and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _copy(shipped: Path, found: Path) -> None:
    for path in shipped.iterdir():
        if path.is_dir() and not (found / path.name).exists():
            shutil.copytree(path, found / path.name)
    if (shipped / _COMPLETE).exists():
        (found / _COMPLETE).touch()


def _remove_old(found: Path) -> None:
    others = [path for path in found.parent.glob("kernels-*") if path != found]
    for old in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[_OTHERS:]:
        shutil.rmtree(old, ignore_errors=True)


def _taken(lock: int) -> bool:
    """Take the lock of an open file, if no other process has it. Where a file system has no locks, all take it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@functools.cache
def _name() -> str:
    from importlib.metadata import version

    found = hashlib.sha256()
    for source in sorted(_PACKAGE.glob("*/kernels/*.py")):
        found.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    about = [version("numba"), version("llvmlite"), sys.version, *_processor()]
    found.update("\0".join(about).encode())
    return f"kernels-{found.hexdigest()[:16]}"


def _processor() -> list[str]:
    """What the compiler may make use of. Where numba is told all of it, the processor itself does not matter."""
    told = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NUMBA_CPU")]
    if "NUMBA_CPU_FEATURES" in os.environ or os.environ.get("NUMBA_CPU_NAME", "").lower() == "generic":
        return [platform.machine(), *told]
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return [platform.machine(), platform.processor(), *told]
    wanted = ("model name", "flags", "Features", "CPU part")
    return [platform.machine(), *sorted({line for line in lines if line.startswith(wanted)}), *told]
