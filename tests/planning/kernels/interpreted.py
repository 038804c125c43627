"""Kernels as plain Python, with all that they are made of: tests reach their parts, and nothing is compiled."""

import importlib
import sys
from types import ModuleType
from typing import Any

from dataserver.planning import kernels
from dataserver.planning.kernels import compiler

DECORATORS = ("kernel", "part", "inlined_part", "high_word", "load_word", "store_word", "fetch_line")


def interpreted(name: str) -> Any:
    """A module of kernels, such as `kernels.heap`, whose functions are those in its text, not compiled."""
    names = f"{kernels.__name__}."
    compiled = {key: sys.modules.pop(key) for key in list(sys.modules) if key.startswith(names)}
    before = {key: value for key, value in vars(kernels).items() if isinstance(value, ModuleType)}
    decorators = {key: vars(compiler)[key] for key in DECORATORS}
    vars(compiler).update(dict.fromkeys(DECORATORS, lambda function: function))
    sys.modules[compiler.__name__] = compiler
    try:
        return importlib.import_module(names + name.removeprefix("kernels."))
    finally:
        for key in [key for key in sys.modules if key.startswith(names)]:
            del sys.modules[key]
        sys.modules.update(compiled)
        for key in [key for key, value in vars(kernels).items() if isinstance(value, ModuleType)]:
            del vars(kernels)[key]  # `from kernels import search` finds the attribute before it imports
        vars(kernels).update(before)
        vars(compiler).update(decorators)
