"""What columns of a parquet become, and how much of them is in memory."""

from typing import Final

import pyarrow as pa

MAX_SIDECAR_VALUE_BYTES: Final = 1 << 29
"""Limit of the decoded columns, and of one while it is read: a few bytes of a parquet can be a very long string."""

READ_ROWS: Final = 256
"""Rows decoded at a time at most, where each may be as long as the column."""


def target_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the type a column is stored as; None for those that no filter could compare, such as lists and times."""
    kind = without_dictionary(kind)
    if pa.types.is_boolean(kind):
        return pa.bool_()
    if pa.types.is_integer(kind):
        return pa.int64()
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_decimal(kind):
        return pa.float64()
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return pa.string()
    return pa.string() if is_text(kind) else None


def is_text(kind: pa.DataType) -> bool:
    """Whether values are strings as they are stored, and not dates that become some."""
    kind = without_dictionary(kind)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def without_dictionary(kind: pa.DataType) -> pa.DataType:
    """The type of values that may be stored in a dictionary, as pandas stores categories."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind
