"""What Parquet shards are made of: page headers, levels, pages and their addresses."""

import io

import pyarrow as pa
import pytest
from builders.parquets import varint
from hypothesis import given
from hypothesis import strategies as st

from dataserver.dataset.errors import SampleError
from dataserver.dataset.shards import pages as pages_module
from dataserver.dataset.shards.hashing import HashingReader
from dataserver.dataset.shards.pages import Page, PageTable, decode_pages, encode_pages, unpack
from dataserver.dataset.shards.parquet.chunk import Chunk, ChunkReader, ChunkValues
from dataserver.dataset.shards.parquet.levels import decode_hybrid
from dataserver.dataset.shards.parquet.page_header import DICTIONARY_PAGE, parse_page_header
from dataserver.varints import CutError


def page(kind: int, count: int, plain: int, body: bytes, encoding: int = 0) -> bytes:
    """A page of a column without nulls and lists; `plain` bytes long, as it says."""
    inner = b"\x15" + varint(2 * count) + b"\x15" + varint(2 * encoding)
    inner = b"\x4c" + inner if kind == DICTIONARY_PAGE else b"\x2c" + inner + b"\x15\x06\x15\x06"
    sizes = b"".join(b"\x15" + varint(2 * number) for number in (kind, plain, len(body)))
    return sizes + inner + b"\0\0" + body


def chunk_of(*pages: bytes, num_values: int, codec: str) -> ChunkValues:
    """What is read of a chunk of such pages."""
    data = b"".join(pages)
    reader = HashingReader(io.BytesIO(data), len(data))
    chunk = Chunk(0, 0, 0, len(data), num_values, codec, max_def=0, max_rep=0, element_def=0)
    return ChunkReader(reader, [], lambda _: lambda content, _: SampleError("missing_image", content.decode())).read(
        chunk
    )


def test_dictionaries_are_bounded_by_the_values_of_their_column() -> None:
    found = chunk_of(page(DICTIONARY_PAGE, 1 << 58, 10, b"x" * 10), num_values=5, codec="LZ4")
    assert "fewer are left of 5" in str(found.error)
    empty = page(DICTIONARY_PAGE, 5, 20, pa.compress(bytes(20), "zstd", asbytes=True))
    found = chunk_of(empty, empty, num_values=5, codec="ZSTD")
    assert "a second dictionary" in str(found.error)


def test_pages_without_values_cost_nothing() -> None:
    value = (3).to_bytes(4, "little") + b"abc"
    found = chunk_of(*[page(0, 0, 0, b"")] * 999, page(0, 1, 7, value), num_values=1, codec="UNCOMPRESSED")
    assert found.error is None
    assert [str(value.detail) for value in found.values if isinstance(value, SampleError)] == ["abc"]
    assert len(found.reps) == 1


def test_what_is_packed_is_hardly_longer_than_what_it_becomes() -> None:
    found = chunk_of(page(0, 1, 7, bytes(1 << 20)), num_values=1, codec="ZSTD")
    (value,) = found.values
    assert isinstance(value, SampleError)
    assert (value.kind, found.error) == ("needs_convert", None)
    assert "a page of 7 bytes takes 1048576" in value.detail


def test_headers_are_cut_or_wrong_but_never_a_crash() -> None:
    for data in (b"", b"\x15", b"\x15\x00\x15", b"\xff" * 40, b"\x1c" * 40, b"\x19" * 40, b"\x00", b"\x15\x02\x00"):
        with pytest.raises((CutError, ValueError)):
            parse_page_header(data)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_header_or_refused(data: bytes) -> None:
    try:
        header, length = parse_page_header(data)
    except (CutError, ValueError):
        return
    assert length <= len(data)
    assert min(header[:7]) >= 0


def naive_hybrid(values: list[int], width: int, packed: bool) -> bytes:
    """The longest spelling of each kind."""
    size = -(-width // 8)
    if not packed:
        return b"".join(bytes([2]) + value.to_bytes(size, "little") for value in values)
    groups = -(-len(values) // 8)
    bits = sum(value << (width * n) for n, value in enumerate(values))
    return varint(groups << 1 | 1) + bits.to_bytes(groups * width, "little")


@given(st.integers(1, 20), st.data(), st.booleans())
def test_levels_are_decoded(width: int, data: st.DataObject, packed: bool) -> None:
    values = data.draw(st.lists(st.integers(0, (1 << width) - 1), max_size=50))
    encoded = naive_hybrid(values, width, packed)
    assert decode_hybrid(encoded, width, len(values)).tolist() == values
    if values:
        with pytest.raises(ValueError, match=r"of \d+ numbers"):
            decode_hybrid(encoded[: 0 if packed else len(encoded) - 1], width, len(values))


def test_empty_runs_and_wide_numbers_are_refused() -> None:
    for data, width in ((b"\x00" * 8, 1), (b"\x01" * 8, 1), (b"\x02\x00", 33)):
        with pytest.raises(ValueError, match=r"empty run|bits"):
            decode_hybrid(data, width, 4)


@pytest.mark.parametrize("codec", pages_module.PACKED)
def test_a_page_must_have_the_length_that_it_declares(codec: str) -> None:
    data = pa.compress(b"words" * 50, codec.lower(), asbytes=True)
    assert unpack(data, 250, codec) == b"words" * 50
    assert unpack(b"", 0, codec) == b""
    for wrong in (0, 249, 251, 5000):
        with pytest.raises(ValueError, match="a page"):
            unpack(data, wrong, codec)
    with pytest.raises(ValueError, match="a page"):
        unpack(data[:-3], 250, codec)


def test_addresses_find_their_pages() -> None:
    pages = [Page(4, 10, 100, 0), Page(14, 10, 50, 1)]
    table = decode_pages(encode_pages(pages), 1000)
    assert [table.find(address) for address in (1000, 1099, 1100, 1149)] == [(0, 0), (0, 99), (1, 0), (1, 49)]
    with pytest.raises(IndexError):
        table.find(999)
    with pytest.raises(IndexError):
        PageTable([], 10).find(10)
    for page in (Page(995, 10, 1, 0), Page(-1, 1, 1, 0), Page(4, 1, 1 << 40, 0), Page(4, 1, 1, 9)):
        with pytest.raises(ValueError, match="no shard has"):
            decode_pages(encode_pages([page]), 1000)
