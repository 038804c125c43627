"""Makes the machine code of kernels, with numba. Import only where one has to be compiled."""

import gc
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Final

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.np.arrayobj import populate_array

from dataserver.planning.kernels.parts import PARTS

_log = logging.getLogger(__name__)
_POINTER: Final = ir.IntType(8).as_pointer()
_WORD: Final = ir.IntType(64)
_HEAD: Final = object.__basicsize__
"""Bytes before the fields of an array object, which are the address of the data, the number of dimensions, and the
addresses of shape and strides, 8 bytes each (PyArrayObject_fields in numpy's C API)."""
_DATA, _SHAPE, _STRIDES = _HEAD, _HEAD + 16, _HEAD + 24
_dispatchers: dict[Callable[..., Any], Any] = {}


@numba.extending.intrinsic  # type: ignore[untyped-decorator]
def _high_word(_context: Any, a: Any, b: Any) -> Any:
    """The high word of the product of two uint64: of 128 bits, and a fourth of the time of four products of halves."""

    def multiply(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(word, wide) for word in given))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _WORD)

    return numba.uint64(a, b), multiply


@numba.extending.intrinsic  # type: ignore[untyped-decorator]
def _load_word(_context: Any, array: Any, at: Any) -> Any:
    """Four bytes of an array as one number, which need not begin at a multiple of four."""

    def load(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.load(_place(context, builder, signature, given, 32), align=1)

    return numba.uint32(array, at), load


@numba.extending.intrinsic  # type: ignore[untyped-decorator]
def _store_word(_context: Any, array: Any, at: Any, word: Any) -> Any:
    """Write as many as a number has."""

    def store(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        builder.store(given[2], _place(context, builder, signature, given, word.bitwidth), align=1)
        return context.get_dummy_value()

    return numba.void(array, at, word), store


@numba.extending.intrinsic  # type: ignore[untyped-decorator]
def _fetch_line(_context: Any, array: Any, at: Any) -> Any:
    """Have the processor fetch a line of memory, to be written and kept near, and go on meanwhile."""

    def fetch(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        to_write, near, data = (ir.Constant(number, n) for n in (1, 3, 1))
        builder.call(prefetch, [_place(context, builder, signature, given, 8), to_write, near, data])
        return context.get_dummy_value()

    return numba.void(array, at), fetch


def _place(context: Any, builder: Any, signature: Any, given: Any, bits: int) -> Any:
    """Where a number of bytes behind the first of an array a word of so many bits lies."""
    array = context.make_array(signature.args[0])(context, builder, given[0])
    return builder.bitcast(builder.gep(array.data, [given[1]]), ir.IntType(bits).as_pointer())


_INTRINSICS: Final = {
    "high_word": _high_word,
    "load_word": _load_word,
    "store_word": _store_word,
    "fetch_line": _fetch_line,
}


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Look for no garbage meanwhile.

    What numba has compiled and nobody refers to any more leaves llvmlite's set of modules when it is collected. LLVM
    hands over an object file in a callback that looks for its module in that set: one that changes under it costs the
    object file, since ctypes drops the error ("no compiled object yet").
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@global_compiler_lock  # type: ignore[untyped-decorator]
@_nothing_collected()
def machine_code(function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """The object file of a kernel for arguments like these, behind a line of JSON that says how it is called.

    Its entry takes, for each array, integer or truth value among the arguments, the address of the object or an int64,
    and then the address of int64s for what is returned. It returns 0, or what numba calls a status.
    """
    _log.info("compiling %s.%s for the cache", function.__module__, function.__qualname__)
    signature = tuple(map(numba.typeof, arguments))
    dispatcher = _for_numba(function, {})
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    context = dispatcher.targetctx
    name = f"loop.{compiled.fndesc.unique_name}"
    library = context.codegen().create_library(name)
    library.enable_object_caching()
    module = library.create_ir_module(name)
    results = _add_entry(context, module, compiled, signature, name)
    library.add_ir_module(module)
    library.add_linking_library(compiled.library)
    library.finalize()
    code: bytes = library._get_compiled_object()
    returned = compiled.signature.return_type
    about = {
        "entry": name,
        "results": results,
        "tuple": isinstance(returned, numba.types.BaseTuple),
        "bool": isinstance(returned, numba.types.Boolean),
    }
    return json.dumps(about).encode() + b"\n" + code


def _for_numba(function: Callable[..., Any], options: dict[str, str]) -> Any:
    """The function as numba takes it: the parts that it calls are numba's in its copy of the module's names."""
    if function in _dispatchers:
        return _dispatchers[function]
    if "intrinsic" in options:
        return _INTRINSICS[options["intrinsic"]]
    names = dict(function.__globals__)
    for name in function.__code__.co_names:
        value = names.get(name)
        if isinstance(value, FunctionType) and value in PARTS:
            names[name] = _for_numba(value, PARTS[value])
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    compiler = numba.njit(_nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)
    found = _dispatchers[function] = compiler(copy)
    return found


def _add_entry(context: Any, module: ir.Module, compiled: Any, signature: Sequence[Any], name: str) -> int:
    """Add the entry of a compiled function to a module. Returns how many int64s it writes for what is returned."""
    takes = [_POINTER if isinstance(leaf, numba.types.Array) else _WORD for kind in signature for leaf in _leaves(kind)]
    entry = ir.Function(module, ir.FunctionType(ir.IntType(32), [*takes, _WORD.as_pointer()]), name)
    builder = ir.IRBuilder(entry.append_basic_block())
    *given, out = entry.args
    left = iter(given)
    values = [_value(context, builder, kind, left) for kind in signature]
    returned = compiled.signature.return_type
    kind = context.call_conv.get_function_type(returned, signature)
    function = cgutils.get_or_insert_function(module, kind, compiled.fndesc.llvm_func_name)
    status, result = context.call_conv.call_function(builder, function, returned, signature, values)
    results: list[Any] = []
    if isinstance(returned, numba.types.BaseTuple):
        results = [builder.extract_value(result, k) for k in range(len(returned))]
    elif returned != numba.types.none:
        results = [result]
    with builder.if_then(status.is_ok):
        for k, value in enumerate(results):
            word = value if value.type == _WORD else builder.zext(value, _WORD)  # a truth value
            builder.store(word, builder.gep(out, [ir.Constant(ir.IntType(32), k)]))
    builder.ret(builder.select(status.is_ok, ir.Constant(ir.IntType(32), 0), status.code))
    return len(results)


def _leaves(kind: Any) -> Iterator[Any]:
    """The arrays and scalars of an argument's type."""
    if isinstance(kind, numba.types.BaseTuple):
        for inner in kind:
            yield from _leaves(inner)
    else:
        yield kind


def _value(context: Any, builder: Any, kind: Any, left: Iterator[Any]) -> Any:
    """An argument as numba has it, from the entry's arguments that are left."""
    if isinstance(kind, numba.types.BaseTuple):
        return context.make_tuple(builder, kind, [_value(context, builder, inner, left) for inner in kind])
    given = next(left)
    if isinstance(kind, numba.types.Array):
        return _array(context, builder, kind, given)
    if isinstance(kind, numba.types.Boolean):
        return builder.icmp_unsigned("!=", given, ir.Constant(_WORD, 0))
    return given


def _array(context: Any, builder: Any, kind: Any, address: Any) -> Any:
    def field(offset: int, of: Any) -> Any:
        place = builder.gep(address, [ir.Constant(ir.IntType(32), offset)])
        return builder.load(builder.bitcast(place, of.as_pointer()))

    def numbers(offset: int) -> list[Any]:
        first = field(offset, _WORD.as_pointer())
        return [builder.load(builder.gep(first, [ir.Constant(ir.IntType(32), k)])) for k in range(kind.ndim)]

    array = context.make_array(kind)(context, builder)
    item = context.get_data_type(kind.dtype)
    populate_array(
        array,
        data=field(_DATA, item.as_pointer()),
        shape=numbers(_SHAPE),
        strides=numbers(_STRIDES),
        itemsize=context.get_abi_sizeof(item),
        meminfo=None,
    )
    return array._getvalue()
