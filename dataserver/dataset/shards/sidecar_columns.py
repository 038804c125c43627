"""Which columns of a sidecar are kept, as which types, and what is said of values and columns that are not.

Types are int64, float64, bool and string; a missing value is null, and NaN, which is how pandas writes a missing
float, is null too. So is a value that does not fit the type of its column: one of them costs no other value anything.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from dataserver.dataset.errors import DatasetError, Findings, is_of_storage
from dataserver.dataset.kinds import ODD_VALUES, UNUSABLE_COLUMN
from dataserver.dataset.shards.parts import Scalar

EXCLUDED: Final = frozenset({"key", "caption", "exif"})
"""The key and the caption are columns of their own; exif is a long text that nobody filters by."""

MAX_COLUMNS: Final = 256
MAX_COLUMN_NAME_CHARS: Final = 128

INT64_RANGE: Final = range(-(1 << 63), 1 << 63)
FLOAT64_RANGE: Final = range(-int(sys.float_info.max), int(sys.float_info.max) + 1)

_FAMILIES: Final[dict[type[Scalar], str]] = {int: "number", float: "number", str: "string", bool: "bool"}
"""Families in order: where two have as many values in a column, those of the first are kept."""


@contextlib.contextmanager
def refusing(kind: str, what: str, findings: Findings) -> Iterator[None]:
    """Count as a finding what cannot be used; that storage failed, or memory, says nothing of it and is raised."""
    try:
        yield
    except (MemoryError, DatasetError):  # Arrow's is one of its exceptions as well
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        if is_of_storage(error):
            raise
        findings.add("", kind, f"{what}: {error}")


def usable_names(names: Iterable[str], findings: Findings) -> list[str]:
    """Return the names of the columns to keep, sorted."""
    usable = []
    for name in sorted(set(names) - EXCLUDED):
        if 0 < len(name) <= MAX_COLUMN_NAME_CHARS and name.isprintable():
            usable.append(name)
        else:
            need = f"a name needs 1 to {MAX_COLUMN_NAME_CHARS} characters that can be printed"
            findings.add("", UNUSABLE_COLUMN, f"a column is called {name[:40]!a}, {len(name)} characters; {need}")
    if len(usable) > MAX_COLUMNS:
        findings.add("", "too_many_columns", f"{len(usable)} sidecar columns, the first {MAX_COLUMNS} are kept")
    return usable[:MAX_COLUMNS]


def nan_to_null(array: pa.Array) -> pa.Array:
    """The same values; float64 without NaN."""
    if array.type != pa.float64():
        return array
    return pc.if_else(pc.is_nan(array), pa.scalar(None, pa.float64()), array)


def report_misfits(name: str, given: list[Any], stored: pa.Array, keys: Sequence[str], out: Findings) -> None:
    """Say how many values of a column became null because they do not fit its type, and which is the first."""
    fits = stored.is_valid().to_pylist()
    odd = [row for row, value in enumerate(given) if not fits[row] and value is not None]
    if odd:
        first = f"the first is {str(given[odd[0]])[:40]!a} of sample {keys[odd[0]]}"
        out.add("", ODD_VALUES, f"{name}: values that do not fit {stored.type} and are null: {len(odd)}, {first}")


def json_columns(keys: Sequence[str], scalars: Sequence[dict[str, Scalar]], findings: Findings) -> dict[str, pa.Array]:
    """Make columns of the union of all entries of .json members, each of the type that most of its values have."""
    names = usable_names({name for row in scalars for name in row}, findings)
    return {name: _json_column(name, [row.get(name) for row in scalars], keys, findings) for name in names}


def _json_column(name: str, values: list[Any], keys: Sequence[str], findings: Findings) -> pa.Array:
    counts = Counter(type(value) for value in values if value is not None)
    families = Counter[str]()
    for kind, family in _FAMILIES.items():
        families[family] += counts[kind]
    family = max(families, key=families.__getitem__)  # the first of equal ones
    stored: pa.Array
    if family == "string":
        stored = pa.array([v if type(v) is str else None for v in values], pa.string())
    elif family == "bool":
        stored = pa.array([v if type(v) is bool else None for v in values], pa.bool_())
    elif not counts[float]:
        stored = pa.array([v if type(v) is int and v in INT64_RANGE else None for v in values], pa.int64())
    else:
        stored = pa.array([_float(v) for v in values], pa.float64())
    report_misfits(name, values, stored, keys, findings)
    return nan_to_null(stored)


def _float(value: Scalar | None) -> float | None:
    fits = type(value) is float or (type(value) is int and value in FLOAT64_RANGE)
    return float(value) if fits and value is not None else None
