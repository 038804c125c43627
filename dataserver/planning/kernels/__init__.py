"""Compiled loops of the planner: int64 arrays in and out.

Every machine compiles them once, with numba, and keeps their machine code (`files.py` says where). From then on a
process loads that with llvmlite alone (`loop.py`) in some milliseconds: numba itself takes a second to load, and as
much memory as the rest of a server. Even so, this package is imported only inside the functions that call a kernel,
never at the top of a module: it belongs to the extra `server`, and a trainer needs neither.

What takes long to compile is kept out of kernels: numpy's functions (`arrays.py` has loops in their place), slices
assigned to slices, and counted references. So none allocates: a plain function makes the arrays that a kernel works on,
and calls it. Each level of parts is compiled once more in its caller, so there are few, and what is called in one place
is inlined.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar, cast

from dataserver.planning.compiled import interpreted
from dataserver.planning.kernels.loop import Loop
from dataserver.planning.kernels.parts import PARTS

_loops: dict[str, Loop] = {}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(function: _Function) -> _Function:
    """Compile a function on its first call, or load it; it runs without the interpreter's lock.

    It takes arrays, integers, truth values and named tuples of these, by position, and returns none, one or a tuple of
    the latter. It counts no references, so it must neither allocate nor return arrays. Literals among the arguments of
    its parts would compile them once more for each.

    Neither fastmath nor parallel: results must not depend on the processor.
    """
    if interpreted():
        return function
    loop = _loops[f"{function.__module__}.{function.__qualname__}"] = Loop(function)
    return cast(_Function, loop)


def part(function: _Function) -> _Function:
    """A loop that kernels call. It must not allocate."""
    PARTS[function] = {}
    return function


def inlined_part(function: _Function) -> _Function:
    """A part that is called in one place: it is compiled as a piece of its caller, which is quicker."""
    PARTS[function] = {"inline": "always"}
    return function


def high_word(function: _Function) -> _Function:
    """A function of two uint64 that is the high word of their product: its kernels do not call it, but multiply."""
    PARTS[function] = {"intrinsic": "high_word"}
    return function


def load_word(function: _Function) -> _Function:
    """A function of a C-contiguous array of bytes and a number that reads the uint32 at that byte, wherever it is."""
    PARTS[function] = {"intrinsic": "load_word"}
    return function


def store_word(function: _Function) -> _Function:
    """A function of the same and an unsigned number that writes it: as many bytes as its type has.

    Sums and shifts of numbers have 64 bits in compiled code, so what is to have fewer is converted in the call.
    """
    PARTS[function] = {"intrinsic": "store_word"}
    return function


def fetch_line(function: _Function) -> _Function:
    """A function of the same array and number that does nothing, but has the memory there near when it is written."""
    PARTS[function] = {"intrinsic": "fetch_line"}
    return function


def not_compiled() -> list[str]:
    """The kernels, of all modules of this package, that the next process would have to compile."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        if module.name != f"{__name__}.compiling":  # it imports the compiler
            importlib.import_module(module.name)
    return sorted(name for name, loop in _loops.items() if name.startswith(__name__) and not loop.kept())
