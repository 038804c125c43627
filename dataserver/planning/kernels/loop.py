"""Kernels as machine code, and how they are called.

A kernel's entry takes the addresses of array objects and integers, so that a call costs little more than looking at
the arguments: it reads data, shape and strides from the objects itself (`compiling.py` makes it).
"""

import ctypes
import functools
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from dataserver.planning.kernels.files import LoopFiles

_C, _FORTRAN, _ALIGNED, _WRITEABLE = 0x1, 0x2, 0x100, 0x400
"""Flags of an array. What is contiguous in both senses counts as C, so that arrays with one row have no code apart."""
_ALL: Final = _C | _FORTRAN | _ALIGNED | _WRITEABLE
_LAYOUT: Final = {flags: flags & ~_FORTRAN if flags & _C else flags for flags in range(_ALL + 1) if not flags & ~_ALL}
"""Of the flags of an array, those that its machine code depends on."""
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1

Key = tuple[object, ...]
"""What machine code depends on, for each argument: for an array its dtype, and dimensions and flags as one number; for
a named tuple its class and then its fields; `int` or `bool`."""


class Loop:
    """A kernel. Thread-safe."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        """As it is written."""
        self._name = f"{function.__module__}.{function.__qualname__}"
        self._files = LoopFiles.of(function)
        self._lock = threading.Lock()
        self._entries: dict[Key, _Entry] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Run it.

        Raises:
            TypeError, OverflowError: an argument is of a kind that no kernel takes, or beyond int64.
            ArithmeticError: the loop failed, as by a division by zero.
        """
        kinds: list[object] = []
        values: list[Any] = []
        _flatten(arguments, kinds, values)
        key = tuple(kinds)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._load(key, arguments)
        return entry(values)

    def kept(self) -> bool:
        """Whether the next process need not compile it, for whatever signature."""
        return self._files.kept()

    def _load(self, key: Key, arguments: Sequence[Any]) -> "_Entry":
        def compiled() -> bytes:
            from dataserver.planning.kernels.compiling import machine_code

            code: bytes = machine_code(self.function, arguments)
            return code

        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                code = self._files.load("; ".join(map(_spelled, key)), compiled)
                entry = self._entries[key] = _Entry(self._name, key, code)
            return entry


def _flatten(arguments: Sequence[Any], kinds: list[object], values: list[Any]) -> None:
    for value in arguments:
        kind = type(value)
        if kind is np.ndarray:
            kinds.append(value.dtype)
            kinds.append(value.ndim << 16 | _LAYOUT[value.flags.num & _ALL])
            values.append(value)
        elif kind is int or kind is bool:
            if not _LEAST <= value <= _MOST:
                raise OverflowError(f"{value} is beyond int64, which is all that compiled loops take")
            kinds.append(kind)
            values.append(value)
        elif isinstance(value, tuple):
            kinds.append(kind)
            _flatten(value, kinds, values)
        elif isinstance(value, np.integer | np.bool_):
            _flatten((value.item(),), kinds, values)
        else:
            raise TypeError(f"compiled loops take arrays, integers, truth values and tuples of these, not {kind}")


def _spelled(kind: object) -> str:
    if isinstance(kind, type):
        return f"{kind.__module__}.{kind.__qualname__}"
    return kind.str if isinstance(kind, np.dtype) else str(kind)


class _Entry:
    """Machine code for one signature, ready to be called."""

    def __init__(self, name: str, key: Key, code: bytes) -> None:
        head, _, objects = code.partition(b"\n")
        about = json.loads(head)
        self._name, self._num, self._is_tuple = name, about["results"], about["tuple"]
        self._is_bool = about["bool"]
        self._results = ctypes.c_int64 * max(self._num, 1)
        takes = [ctypes.py_object if isinstance(kind, np.dtype) else ctypes.c_int64
                 for kind in key if isinstance(kind, np.dtype) or kind in (int, bool)]  # fmt: skip
        self._call = ctypes.CFUNCTYPE(ctypes.c_int32, *takes, ctypes.c_void_p)(_address(about["entry"], objects))

    def __call__(self, values: list[Any]) -> Any:
        results = self._results() if self._num else None
        status = self._call(*values, results)
        if status:
            raise ArithmeticError(f"the compiled loop {self._name} failed with status {status}")
        if results is None:
            return None
        if self._is_tuple:
            return tuple(results)
        return bool(results[0]) if self._is_bool else results[0]


def _address(entry: str, objects: bytes) -> int:
    """Load an object file; the address of a function in it."""
    import llvmlite.binding as llvm

    with _engine_lock:
        engine = _engine()
        engine.add_object_file(llvm.ObjectFileRef.from_data(objects))
        engine.finalize_object()
        address: int = engine.get_function_address(entry)
        return address


_engine_lock = threading.Lock()


@functools.cache
def _engine() -> Any:
    """What object files are loaded into, and stay in as long as the process runs."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
