"""Fragments of SNAPPY blocks: what they decompress to, and blocks that have none."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserver.dataset.shards.pages import FRAGMENT, STORED, unpack, unpack_begin
from dataserver.dataset.shards.parquet.snappy import FRAGMENT_BYTES, fragments


def joined(block: bytes) -> bytes:
    found = fragments(block)
    assert found is not None
    parts = [block[one.start : one.start + one.packed_bytes] for one in found]
    assert all(one.plain_bytes == FRAGMENT_BYTES for one in found[:-1])
    return b"".join(
        part if one.is_stored else unpack(part, one.plain_bytes, FRAGMENT)
        for one, part in zip(found, parts, strict=True)
    )


@given(st.integers(0, 2**32), st.integers(0, 300_000), st.integers(1, 256), st.floats(0, 0.3))
def test_fragments_are_the_block(seed: int, size: int, values: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    data = bytearray(rng.bytes(size))
    for start in rng.integers(0, max(size, 1), int(share * 20)):  # copies within, and over the bounds of fragments
        length = int(rng.integers(values, 40_000))
        data[start : start + length] = data[: len(data[start : start + length])]
    block = pa.compress(bytes(data), "snappy", asbytes=True)
    assert joined(block) == bytes(data)


def test_images_are_stored_in_their_fragments() -> None:
    found = fragments(pa.compress(np.random.default_rng(1).bytes(200_000), "snappy", asbytes=True))
    assert found is not None
    assert [(one.is_stored, one.packed_bytes) for one in found] == [(True, n) for n in (65_536, 65_536, 65_536, 3_392)]


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"\x05",
        b"\x05\x10hell",
        b"\x05\x10hello!",
        b"\x05\x00a\x0d\x02",  # a copy from before the beginning
        b"\x05\x00a\x0d\x00",
        b"\xff\xff\xff\xff\x0f\x00a",
        b"\x06\x10hello",
        b"\xff" * 11,
    ],
)
def test_damaged_blocks_have_no_fragments(block: bytes) -> None:
    assert fragments(block) is None


def test_copies_over_a_bound_are_noticed() -> None:
    """As a writer without bounds would have it: 65,536 bytes, then a copy of the first four."""
    data = np.random.default_rng(2).bytes(FRAGMENT_BYTES)
    literal = b"\xf4" + (FRAGMENT_BYTES - 1).to_bytes(2, "little") + data
    size = FRAGMENT_BYTES + 4
    varint = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14])
    block = varint + literal + bytes([3 | 3 << 2]) + FRAGMENT_BYTES.to_bytes(4, "little")
    assert pa.decompress(block, size, "snappy", asbytes=True) == data + data[:4]
    assert fragments(block) is None
    longer = varint[:2] + bytes([(size + 0) >> 14]) + b"\xf4" + (FRAGMENT_BYTES - 1).to_bytes(2, "little") + data
    assert fragments(longer + b"\x0cabcd") is not None


@pytest.mark.parametrize("codec", ["ZSTD", "GZIP"])
def test_the_beginning_of_a_page_is_all_that_is_decompressed(codec: str) -> None:
    data = np.random.default_rng(3).bytes(300_000)
    packed = pa.compress(data, codec.lower(), asbytes=True)
    for length in (0, 1, 70_000, len(data)):
        assert unpack_begin(packed, length, codec) == data[:length]
    assert unpack_begin(packed[:200_000], 100_000, codec) == data[:100_000]
    for broken in (packed[:1000], b"junk" * 100):
        with pytest.raises(ValueError, match="a page"):
            unpack_begin(broken, 100_000, codec)
    with pytest.raises(ValueError, match="is shorter"):
        unpack_begin(packed, len(data) + 1, codec)
    assert STORED not in ("ZSTD", "GZIP")
