"""Compiled loops of the planner: int64 arrays in and out.

Importing this package imports numba, which takes 0.2 s and belongs to the extra `server`; a trainer needs neither.
So it and its modules are imported only inside the functions that call a kernel, never at the top of a module.

Numba keeps compiled code in __pycache__ beside the module or, where that is not writable, in the user's cache
directory; the variable NUMBA_CACHE_DIR names another one.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import event

_log = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(function: _Function) -> _Function:
    """Compile a function on its first call, or load it from numba's cache; it runs without the interpreter's lock.

    Neither fastmath nor parallel: results must not depend on the processor.
    """
    return cast(_Function, numba.njit(cache=True, nogil=True)(function))


def part(function: _Function) -> _Function:
    """A part of a kernel's innermost loop: it becomes part of its callers, since a call costs as much as its work."""
    return cast(_Function, numba.njit(inline="always")(function))


class _Announcer(event.Listener):
    """Logs every kernel that is compiled because the cache has none for this processor and version."""

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        if function.__module__.startswith("dataserver.planning."):
            name = f"{function.__module__}.{function.__qualname__}"
            _log.info("compiling %s; numba caches it for the next process", name)

    def on_end(self, event: Any) -> None:
        """Nothing more to log."""


event.register("numba:compile", _Announcer())  # type: ignore[no-untyped-call]
