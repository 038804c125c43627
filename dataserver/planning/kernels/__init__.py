"""Compiled loops of the planner, int64 arrays in and out.

A kernel module holds functions under `@numba.njit(cache=True, nogil=True)` (never fastmath or parallel: results must
not depend on the processor) and is imported only by `load`, inside the functions that call it: importing numba takes
0.2 s and belongs to the extra `server`, and neither is asked of a trainer, which imports `planning.pipeline`.

Numba keeps compiled code in __pycache__ beside the module or, where that is not writable, in the user's cache
directory; NUMBA_CACHE_DIR names another one.
"""

import functools
import importlib
import logging
from typing import Any

_log = logging.getLogger(__name__)


@functools.cache
def load(module: str) -> Any:  # noqa: ANN401
    """A module with kernels, for example `load("kernels.search")`; logs a line for every kernel it has to compile.

    Args:
        module: name below `dataserver.planning`.
    """
    _announce_compilation()
    return importlib.import_module(f"dataserver.planning.{module}")


@functools.cache
def _announce_compilation() -> None:
    """Log every kernel that numba compiles because its cache has none for this processor and version."""
    from numba.core import event

    class Announcer(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:  # noqa: ANN401
            function = event.data["dispatcher"].py_func
            if function.__module__.startswith("dataserver.planning."):
                _log.info("compiling %s.%s; the next process finds it in numba's cache", function.__module__, function.__name__)

        def on_end(self, event: Any) -> None:  # noqa: ANN401
            """Nothing: the start is the news."""

    event.register("numba:compile", Announcer())
