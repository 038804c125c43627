"""Headers of Parquet pages: Thrift's compact protocol, as far as these headers use it.

Source: `parquet.thrift` of the Parquet format, structures PageHeader, DataPageHeader, DataPageHeaderV2 and
DictionaryPageHeader.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from dataserver.dataset.shards.parquet.compact import read_struct
from dataserver.varints import CutError

DATA_PAGE: Final = 0
DICTIONARY_PAGE: Final = 2
DATA_PAGE_V2: Final = 3
DICTIONARY_INDEXES: Final = (2, 8)
"""Encodings of pages that have indexes into a dictionary."""

MAX_HEADER_BYTES: Final = 64 << 10
"""Limit of one header: statistics of long values stand in it, which writers cut to 4 KiB each."""

_FIRST_BYTES: Final = 256
"""Bytes that are read first: most headers are shorter."""


class PageHeader(NamedTuple):
    """What a page says of itself."""

    kind: int
    """DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2, or another one."""
    plain_bytes: int
    """Size of the body, decompressed."""
    packed_bytes: int
    """Size of the body, as it lies in the file."""
    num_values: int
    """Number of values, nulls included."""
    encoding: int
    rep_bytes: int
    """Size of the repetition levels, DATA_PAGE_V2 alone."""
    def_bytes: int
    """Size of the definition levels, DATA_PAGE_V2 alone."""
    is_compressed: bool
    """False where a DATA_PAGE_V2 is stored plain in a compressed column."""


def parse_page_header(data: bytes) -> tuple[PageHeader, int]:
    """Return a header and its length in bytes.

    Args:
        data: begins with the header.

    Raises:
        CutError: it is longer than `data`.
        ValueError: this is no page header.
    """
    fields, end = read_struct(data, 0)
    kind = _number(fields, 1)
    inner_id, encoding_id = {DATA_PAGE: (5, 2), DICTIONARY_PAGE: (7, 2), DATA_PAGE_V2: (8, 4)}.get(kind, (0, 0))
    inner = fields.get(inner_id, {})
    if inner_id and not isinstance(inner, dict):
        raise ValueError("its header has no details")
    header = PageHeader(
        kind,
        _number(fields, 2),
        _number(fields, 3),
        _number(inner, 1) if inner_id else 0,
        _number(inner, encoding_id) if inner_id else 0,
        _number(inner, 6) if kind == DATA_PAGE_V2 else 0,
        _number(inner, 5) if kind == DATA_PAGE_V2 else 0,
        inner.get(7, True) is not False if kind == DATA_PAGE_V2 else True,
    )
    return header, end


def read_page_header(peek: Callable[[int], bytes], left: int) -> tuple[PageHeader, int]:
    """Return the next header of a column and its length in bytes.

    Args:
        peek: shows up to so many bytes, from where the header begins.
        left: bytes of the column from there on.

    Raises:
        ValueError: this is no page header, it is too long, or the column ends within it.
    """
    for limit in (_FIRST_BYTES, MAX_HEADER_BYTES):
        if left > 0:
            try:
                return parse_page_header(peek(min(limit, left)))
            except CutError:
                continue
    raise ValueError("a column ends within the header of a page, or the header is too long")


def _number(fields: dict[int, Any], number: int) -> int:
    """A field that must be there and not negative."""
    found = fields.get(number)
    if type(found) is not int or found < 0:
        raise ValueError(f"its header says {str(found)[:20]} in field {number}")
    return found
