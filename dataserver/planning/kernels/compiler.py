"""What makes kernels of functions. It imports numba, so only modules of kernels import it."""

import contextlib
import functools
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar, cast

import numba
from llvmlite import ir
from numba.extending import intrinsic

from dataserver.planning.kernels import cache

_Function = TypeVar("_Function", bound=Callable[..., Any])
_UNCOUNTED: Final = {"_nrt": False}
"""Compile without numba's reference counts. Kernels allocate nothing, and counting references to the slices that they
take, atomically, made the one that scales images more than twice as slow."""
_BYTE: Final = ir.IntType(8)
_INT: Final = ir.IntType(32)
_WORD: Final = ir.IntType(64)
_first_calls: Final = threading.RLock()
_log = logging.getLogger(__name__)


def kernel(function: _Function) -> _Function:
    """Compile a function on its first call, or load its machine code. It runs without the interpreter's lock.

    It takes arrays, integers, truth values and named tuples of these, by position. It returns none, one or a tuple of
    integers and truth values. It must not allocate. Literals among the arguments of its parts would compile them once
    more for each.

    Neither fastmath nor parallel: results must not depend on the processor.
    """
    if numba.config.DISABLE_JIT:
        return function
    folder = cache.folder()
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
    try:
        compiled = numba.njit(cache=folder is not None, nogil=True, no_cfunc_wrapper=True, **_UNCOUNTED)(function)
    finally:
        numba.config.CACHE_DIR = before
    if folder is not None:
        compiled._cache = _Cache(compiled._cache)
    called = False

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        nonlocal called
        if called:
            return compiled(*arguments)
        with _first_calls, cache.locked(), _nothing_collected():
            found = compiled(*arguments)
        if compiled.stats.cache_misses:
            _log.info("compiled %s.%s", compiled.__module__, compiled.__qualname__)
        called = True
        return found

    return cast(_Function, call)


class _Cache:
    """Numba's cache of a kernel. Where it is damaged, or its disk fails, the kernel is compiled all the same."""

    def __init__(self, of_numba: Any) -> None:
        self._of_numba = of_numba

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_numba, name)

    def load_overload(self, *key: Any) -> Any:
        """What is cached for a signature; None where nothing is that can be used."""
        try:
            return self._of_numba.load_overload(*key)
        except OSError:  # as when it is saved, which says so
            return None
        except Exception as error:  # unpickling damaged bytes raises nearly everything
            found = type(error).__name__
            _log.warning("the cache of compiled kernels is damaged (%s): they are compiled again", found)
            with contextlib.suppress(OSError):  # the disk may be lost as well
                cache.clear()
            return None

    def save_overload(self, *compiled: Any) -> None:
        """Cache what was compiled for a signature."""
        try:
            self._of_numba.save_overload(*compiled)
        except OSError as error:
            _log.warning("a compiled kernel cannot be cached, so that other processes compile it again: %s", error)


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Look for no garbage meanwhile.

    LLVM hands over machine code in a callback, which looks for its module in a set. Garbage of numba leaves that set
    when it is collected. A set that changes in the callback costs the machine code ("no compiled object yet").
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def part(function: _Function) -> _Function:
    """Let kernels call a function, and nothing else. It must not allocate."""
    return cast(_Function, numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_UNCOUNTED)(function))


def inlined_part(function: _Function) -> _Function:
    """Let kernels call a function in one place: it is compiled as a piece of its caller, which is quicker."""
    return cast(_Function, numba.njit(inline="always", **_UNCOUNTED)(function))


def high_word(function: _Function) -> _Function:
    """Compile a function of two uint64, the high word of their product, as a multiplication of 128 bits."""

    def types(_context: Any, a: Any, b: Any) -> Any:
        def multiply(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
            wide = ir.IntType(128)
            product = builder.mul(*(builder.zext(word, wide) for word in given))
            return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _WORD)

        return numba.uint64(a, b), multiply

    return _instead(function, types)


def load_word(function: _Function) -> _Function:
    """Compile a function of a C-contiguous array of bytes and a number: it reads the uint32 at that byte, aligned or
    not."""

    def types(_context: Any, array: Any, at: Any) -> Any:
        def load(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return builder.load(_address(context, builder, signature, given, 32), align=1)

        return numba.uint32(array, at), load

    return _instead(function, types)


def store_word(function: _Function) -> _Function:
    """Compile a function of the same and an unsigned number, which it writes: as many bytes as its type has.

    Sums and shifts of numbers have 64 bits in compiled code, so what is to have fewer is converted in the call.
    """

    def types(_context: Any, array: Any, at: Any, word: Any) -> Any:
        def store(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            builder.store(given[2], _address(context, builder, signature, given, word.bitwidth), align=1)
            return context.get_dummy_value()

        return numba.void(array, at, word), store

    return _instead(function, types)


def fetch_line(function: _Function) -> _Function:
    """Compile a function of the same array and number: the processor fetches the memory there while it goes on."""

    def types(_context: Any, array: Any, at: Any) -> Any:
        def fetch(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            pointer = _BYTE.as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [pointer, _INT, _INT, _INT])
            prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
            to_write, near, data = (ir.Constant(_INT, n) for n in (1, 3, 1))
            builder.call(prefetch, [_address(context, builder, signature, given, 8), to_write, near, data])
            return context.get_dummy_value()

        return numba.void(array, at), fetch

    return _instead(function, types)


def _instead(function: _Function, types: Callable[..., Any]) -> _Function:
    """What compiled code has instead of a function."""
    if numba.config.DISABLE_JIT:
        return function
    return cast(_Function, intrinsic(types))


def _address(context: Any, builder: Any, signature: Any, given: Any, bits: int) -> Any:
    """The address of a word of so many bits, a number of bytes behind the first of an array."""
    array = context.make_array(signature.args[0])(context, builder, given[0])
    return builder.bitcast(builder.gep(array.data, [given[1]]), ir.IntType(bits).as_pointer())
