"""Compiled loops of the planner: int64 arrays in and out.

Importing this package imports numba, which takes 0.2 s and belongs to the extra `server`; a trainer needs neither.
So it and its modules are imported only inside the functions that call a kernel, never at the top of a module.

Every machine compiles kernels once (`cache.py` says where they are kept), so what takes long to compile is kept out of
them: numpy's functions (`arrays.py` has loops in their place), slices assigned to slices, and counted references. A
plain function makes the arrays that a kernel works on, and calls it. Each level of parts is compiled once more in its
caller, so there are few, and what is called in one place is inlined.
"""

import importlib
import logging
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import event

from dataserver.planning.kernels.cache import KernelCache

_log = logging.getLogger(__name__)
_caches: dict[str, KernelCache] = {}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(function: _Function) -> _Function:
    """Compile a function on its first call, or load it from the cache; it runs without the interpreter's lock.

    It counts no references, so it must neither allocate nor return arrays. Literals among the arguments of its parts
    would compile them once more for each.

    Neither fastmath nor parallel: results must not depend on the processor.
    """
    return _kept(numba.njit(_nrt=False, nogil=True, no_cfunc_wrapper=True), function)


def allocating_kernel(function: _Function) -> _Function:
    """A kernel that makes arrays, which takes longer to compile."""
    return _kept(numba.njit(nogil=True, no_cfunc_wrapper=True), function)


def _kept(compiler: Callable[[_Function], Any], function: _Function) -> _Function:
    compiled = compiler(function)
    if not numba.config.DISABLE_JIT:
        compiled._cache = _caches[f"{function.__module__}.{function.__qualname__}"] = KernelCache(function)
    return cast(_Function, compiled)


def part(function: _Function) -> _Function:
    """A loop that kernels call. It counts no references, so it must not allocate."""
    return cast(_Function, numba.njit(_nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


def allocating_part(function: _Function) -> _Function:
    """A part that makes arrays."""
    return cast(_Function, numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


def inlined_part(function: _Function) -> _Function:
    """A part that is called in one place: it is compiled as a piece of its caller, which is quicker."""
    return cast(_Function, numba.njit(inline="always")(function))


def not_compiled() -> list[str]:
    """The kernels, of all modules of this package, that the next process would have to compile."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    return sorted(name for name, cache in _caches.items() if name.startswith(__name__) and not cache.kept())


class _Announcer(event.Listener):  # type: ignore[misc]
    """Logs every kernel that is compiled because the cache has none for this processor and version."""

    def on_start(self, event: Any) -> None:
        """Name it."""
        dispatcher = event.data["dispatcher"]
        if isinstance(dispatcher._cache, KernelCache):
            function = dispatcher.py_func
            _log.info("compiling %s.%s for the cache", function.__module__, function.__qualname__)

    def on_end(self, event: Any) -> None:
        """Nothing more to log."""


event.register("numba:compile", _Announcer())
