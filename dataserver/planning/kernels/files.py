"""Where the machine code of kernels lies: files in the folders of `planning/compiled.py`."""

import contextlib
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from dataserver.planning import compiled

_log = logging.getLogger(__name__)

PATIENCE_S: Final = 60
"""How long a process waits for another one that compiles the same kernel; then it does so itself."""
_POLL_S: Final = 0.05
_DIGEST_BYTES: Final = 32
_SUFFIX: Final = ".loop"


class LoopFiles:
    """The machine code of one kernel, a file for each signature: a digest, and what it is of.

    They are read from all folders and written to the first that takes them. Several processes may do so at once: the
    first compiles, all wait.
    """

    _said = False

    def __init__(self, base: str, stamp: bytes) -> None:
        """The kernel called `base`, made from the source `stamp`: also of kernels outside the folder's digest."""
        self._base, self._stamp = base, stamp

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "LoopFiles":
        """The files of a function's code."""
        source = Path(function.__code__.co_filename)
        return cls(f"{source.stem}.{function.__qualname__}", source.read_bytes())

    def load(self, signature: str, compile_: Callable[[], bytes]) -> bytes:
        """What was kept for a signature, or what the compiler gives, which then is kept."""
        name = f"{self._base}-{hashlib.sha256(self._stamp + signature.encode()).hexdigest()[:16]}{_SUFFIX}"
        found = _find(name)
        if found is not None:
            return found
        lock = self._take_turn()
        try:
            found = _find(name)
            if found is None:
                found = compile_()
                self._save(name, found)
            return found
        finally:
            if lock is not None:
                os.close(lock)

    def kept(self) -> bool:
        """Whether the kernel was kept, for whatever signature."""
        return any(next(folder.glob(f"{self._base}-*{_SUFFIX}"), None) for folder in compiled.folders())

    def _save(self, name: str, code: bytes) -> None:
        """Save to the first folder that takes it; what cannot be saved is compiled again by the next process."""
        reasons = []
        for folder in compiled.folders():
            try:
                if compiled.made(folder):
                    _write(folder / name, hashlib.sha256(code).digest() + code)
                    return
                reasons.append(f"{folder} cannot be made")
            except OSError as error:
                reasons.append(f"{folder}: {error.strerror}")
        if not LoopFiles._said:
            LoopFiles._said = True
            _log.warning(
                "the compiled loops of the planner cannot be kept (%s): every process compiles them again; "
                "set NUMBA_CACHE_DIR to a folder that can be written",
                "; ".join(reasons),
            )

    def _take_turn(self) -> int | None:
        """Wait until no other process compiles this kernel, but not for ever. Returns the open lock, if any."""
        for folder in compiled.folders():
            if compiled.made(folder):
                with contextlib.suppress(OSError):
                    lock = os.open(folder / f"{self._base}.lock", os.O_CREAT | os.O_RDWR, 0o666)
                    break
        else:
            return None
        give_up = time.monotonic() + PATIENCE_S
        while not compiled.taken(lock) and time.monotonic() < give_up:
            time.sleep(_POLL_S)
        return lock


def _find(name: str) -> bytes | None:
    """What is kept under a name, or None. A file that is damaged is said to be, and made anew."""
    for folder in compiled.folders():
        with contextlib.suppress(OSError):  # not readable: as if it were not there
            kept = (folder / name).read_bytes()
            digest, code = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
            if hashlib.sha256(code).digest() == digest:
                return code
            _log.warning("a compiled loop cannot be used (%s is damaged); it is compiled anew", folder / name)
    return None


def _write(path: Path, data: bytes) -> None:
    """Write a file as a whole, or not at all."""
    descriptor, temp = tempfile.mkstemp(".tmp", f".{path.name}.", path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(temp).chmod(0o644)
        Path(temp).replace(path)
    except OSError:
        Path(temp).unlink(missing_ok=True)
        raise
