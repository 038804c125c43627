"""How much memory something takes, counted honestly: with what Python adds to each object."""

import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Final

import numpy as np

_ALLOCATION: Final = 16
"""Bytes that the allocator adds to an object, about."""


def memory_of(value: object) -> int:
    """Bytes of a value and of all that it holds: containers, arrays, dataclasses, models; each object once."""
    seen: set[int] = set()
    stack, total = [value], 0
    while stack:
        found = stack.pop()
        if id(found) in seen or found is None or isinstance(found, bool | type | Enum):
            continue
        seen.add(id(found))
        total += sys.getsizeof(found) + _ALLOCATION
        stack.extend(_parts(found))
    return total


def _parts(value: Any) -> Iterable[object]:
    if isinstance(value, np.ndarray):  # a view has no bytes of its own, but keeps those of the whole
        return () if value.base is None else (value.base,)
    if isinstance(value, str | bytes | int | float):
        return ()
    if isinstance(value, Mapping):
        return (*value.keys(), *value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return value
    slots = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
    slots.discard("__weakref__")  # nothing of its own; of some dataclasses Python before 3.11.3 cannot read it
    return (getattr(value, "__dict__", None), *(getattr(value, name, None) for name in slots))
