"""What a Parquet footer says of its column chunks, checked before pyarrow is asked.

pyarrow 26 ends the process over what is refused here: its accessors let exceptions of C++ pass.

Source: `parquet.thrift` of the Parquet format, structures FileMetaData, RowGroup, ColumnChunk, ColumnMetaData and
SizeStatistics.
"""

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from dataserver.dataset.shards.parquet.compact import read_list_header, read_struct, read_value
from dataserver.varints import CutError

_ROW_GROUPS, _COLUMNS, _METADATA = 4, 1, 3
_ENCRYPTION: Final = (8, 9)
"""Fields of a ColumnChunk that only encrypted columns have, crypto_metadata and encrypted_column_metadata."""
_TYPE, _CODEC, _SIZE_STATISTICS = 1, 4, 16
_TYPES: Final = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
"""As pyarrow names them, by number."""
_CODECS: Final = range(8)
_BYTE_ARRAY_BYTES, _REP_HISTOGRAM, _DEF_HISTOGRAM = 1, 2, 3
_TAIL_BYTES: Final = 8
"""Length of the footer, and PAR1."""
_LIST: Final = 9


class EncryptedError(ValueError):
    """A column is encrypted, so nothing of it can be read."""


def check_footer(handle: pa.NativeFile, schema: pq.ParquetSchema) -> None:
    """Refuse a footer that pyarrow would end the process over.

    Args:
        handle: the file, whose footer pyarrow has parsed.
        schema: of the file.

    Raises:
        EncryptedError: a column is encrypted.
        ValueError: says what is wrong.
        OSError: storage failed.
    """
    size = handle.size()
    handle.seek(size - _TAIL_BYTES)
    num_bytes = int.from_bytes(handle.read(4), "little")
    handle.seek(size - _TAIL_BYTES - num_bytes)
    columns = [schema.column(number) for number in range(len(schema))]
    try:
        for group in _row_groups(handle.read(num_bytes)):
            chunks = group.get(_COLUMNS)
            if not isinstance(chunks, list) or len(chunks) != len(columns):
                raise ValueError("its footer has a row group with more or fewer columns than its schema")
            for column, chunk in zip(columns, chunks, strict=True):
                _check_chunk(column, chunk)
    except CutError:
        raise ValueError("its footer is cut") from None


def _row_groups(footer: bytes) -> Iterator[dict[int, Any]]:
    """One after the other: a footer may have very many."""
    at, number = 0, 0
    while at < len(footer) and (kind := footer[at] & 0x0F):
        step, at = footer[at] >> 4, at + 1
        if step:
            number += step
        else:
            number, at = read_value(footer, at, 5)
        if (number, kind) != (_ROW_GROUPS, _LIST):
            _, at = read_value(footer, at, kind)
            continue
        count, _, at = read_list_header(footer, at)
        for _ in range(count):
            group, at = read_struct(footer, at)
            yield group


def _check_chunk(column: pq.ColumnSchema, chunk: Any) -> None:
    if isinstance(chunk, dict) and any(field in chunk for field in _ENCRYPTION):
        raise EncryptedError(f"column {column.path[:80]} is encrypted, and no key can be given; decrypt the file")
    found = chunk.get(_METADATA) if isinstance(chunk, dict) else None
    if not isinstance(found, dict):
        raise ValueError(f"its footer says nothing of column {column.path[:80]}")
    if found.get(_TYPE) != _TYPES.index(column.physical_type):
        raise ValueError(f"its footer has two types for column {column.path[:80]}")
    if found.get(_CODEC) not in _CODECS:
        raise ValueError(f"its footer has an unknown codec for column {column.path[:80]}")
    sizes = found.get(_SIZE_STATISTICS)
    if not isinstance(sizes, dict):
        return
    levels = ((_REP_HISTOGRAM, column.max_repetition_level), (_DEF_HISTOGRAM, column.max_definition_level))
    counted = [(sizes.get(field), most + 1) for field, most in levels]
    fits = all(not isinstance(found, list) or len(found) in (0, num) for found, num in counted)
    if not fits or (_BYTE_ARRAY_BYTES in sizes and column.physical_type != "BYTE_ARRAY"):
        raise ValueError(f"its footer has size statistics that do not fit column {column.path[:80]}")
