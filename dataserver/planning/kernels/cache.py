"""The cache of compiled kernels: numba's files, in the folders of `planning/compiled.py`."""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, _CacheLocator

from dataserver.planning import compiled

_log = logging.getLogger(__name__)

PATIENCE_S = 60
"""How long a process waits for another one that compiles the same kernel; then it does so itself."""
_POLL_S = 0.05


class _Locator(_CacheLocator):  # type: ignore[misc]
    """Names a kernel. Where it lies, and whether it is fresh, is decided by the folder."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._line, self._py_file = function.__code__.co_firstlineno, file

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> "_Locator":
        return cls(py_func, py_file)

    def ensure_cache_path(self) -> None:
        """Nothing: `_Files` tries several."""

    def get_cache_path(self) -> str:
        return str(compiled.folders()[0])

    def get_source_stamp(self) -> bytes:
        return Path(self._py_file).read_bytes()  # also of kernels outside the folder that the digest covers

    def get_disambiguator(self) -> str:
        return str(self._line)


class _Impl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class KernelCache(FunctionCache):  # type: ignore[misc]
    """The compiled code of one kernel, on disk. Several processes may use it at once: the first compiles, all wait."""

    _impl_class = _Impl

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _Files(self._impl.filename_base, self._impl.locator.get_source_stamp())

    def kept(self) -> bool:
        """Whether the kernel was compiled and saved, for whatever types."""
        return self._cache_file.kept()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled for a signature, or None. A file that cannot be used is said to be, and made anew."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # what a damaged file raises depends on where it is damaged
            _log.warning("a compiled loop cannot be used (%s: %s); it is compiled anew", type(error).__name__, error)
            return None


class _Files:
    """One kernel's files: read from all folders, written to the first that takes them."""

    _said = False

    def __init__(self, base: str, stamp: bytes) -> None:
        self._base = base
        self._files = [(folder, IndexDataCacheFile(str(folder), base, stamp)) for folder in compiled.folders()]
        self._lock: int | None = None

    def load(self, key: Any) -> Any:
        """What was saved, or None: then this process is the one to compile it."""
        found = self._find(key)
        if found is None:
            self._take_turn()
            found = self._find(key)
            if found is not None:
                self._end_turn()
        return found

    def save(self, key: Any, data: Any) -> None:
        """Save to the first folder that takes it; what cannot be saved is compiled again by the next process."""
        reasons = []
        for folder, file in self._files:
            try:
                if compiled.made(folder):
                    file.save(key, data)
                    break
                reasons.append(f"{folder} cannot be made")
            except OSError as error:
                reasons.append(f"{folder}: {error.strerror}")
        else:
            if not _Files._said:
                _Files._said = True
                _log.warning(
                    "the compiled loops of the planner cannot be kept (%s): every process compiles them again; "
                    "set NUMBA_CACHE_DIR to a folder that can be written",
                    "; ".join(reasons),
                )
        self._end_turn()

    def kept(self) -> bool:
        """Whether the kernel was saved, for whatever types."""
        return any((folder / f"{self._base}.nbi").exists() for folder, _ in self._files)

    def _find(self, key: Any) -> Any:
        for _, file in self._files:
            with contextlib.suppress(OSError):  # not readable: as if it were not there
                found = file.load(key)
                if found is not None:
                    return found
        return None

    def _take_turn(self) -> None:
        """Wait until no other process compiles this kernel, but not for ever."""
        self._end_turn()
        for folder, _ in self._files:
            if compiled.made(folder):
                with contextlib.suppress(OSError):
                    self._lock = os.open(folder / f"{self._base}.lock", os.O_CREAT | os.O_RDWR, 0o666)
                    break
        if self._lock is None:
            return
        give_up = time.monotonic() + PATIENCE_S
        while not compiled.taken(self._lock) and time.monotonic() < give_up:
            time.sleep(_POLL_S)

    def _end_turn(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
