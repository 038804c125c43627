"""The bytes between modules, and the blocks they are cut into."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainclient.parallel.broker import RoutingError, RowBlocks
from trainclient.parallel.messages import (
    HEADER_BYTES,
    BrokerMismatchError,
    Kind,
    Stamp,
    decode,
    encode,
    make_header,
)

STAMP = Stamp(bytes(range(32)), step=2**40, microbatch=7)


@given(
    num_valid=st.integers(0, 200),
    rows=st.integers(0, 9),
    width=st.integers(1, 9),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_round_trip(num_valid: int, rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width, generator=generator).to(dtype)
    valid = torch.randint(0, 2, (num_valid,), generator=generator).bool()
    header = make_header(Kind.EMBEDDINGS, STAMP, num_valid, rows * width * dtype.itemsize, 3, 5)
    message = encode(header, valid, values)
    assert message.dtype == torch.uint8
    assert len(message) == header.message_bytes
    found_valid, found = decode(message, header, width, dtype)
    assert torch.equal(found_valid, valid)
    assert found.dtype == dtype
    assert torch.equal(found, values)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", int(Kind.CONDITIONS)),
        ("plan_hash", bytes(24)),
        ("step", 1),
        ("microbatch", 6),
        ("num_valid", 1),
        ("row_bytes", 8),
        ("source", 2),
        ("target", 4),
    ],
)
def test_every_field_must_agree(field: str, value: object) -> None:
    expected = make_header(Kind.EMBEDDINGS, STAMP, 2, 16, 3, 5)
    sent = replace(expected, **{field: value})
    message = torch.zeros(expected.message_bytes, dtype=torch.uint8)
    encoded = encode(sent, torch.ones(sent.num_valid, dtype=torch.bool), torch.zeros(sent.row_bytes // 8, 1).double())
    message[:HEADER_BYTES] = encoded[:HEADER_BYTES]
    with pytest.raises(BrokerMismatchError) as error:
        decode(message, expected, 1, torch.float64)
    assert str(expected) in str(error.value)
    assert str(sent) in str(error.value)


def test_other_bytes_are_told_apart() -> None:
    header = make_header(Kind.ACTIVATIONS, STAMP, 0, 8, 0, 1)
    with pytest.raises(BrokerMismatchError, match="no message"):
        decode(torch.full((header.message_bytes,), 7, dtype=torch.uint8), header, 1, torch.float64)


def blocks(peer: list[int], start: list[int], rows: list[int]) -> RowBlocks:
    arrays = [np.array(column, np.int64) for column in (peer, start, rows)]
    return RowBlocks(*arrays, arrays[1])


def test_blocks_that_cover_the_rows() -> None:
    blocks([1, 0, 1], [3, 0, 5], [2, 3, 1]).check(6, 2, "embeddings")
    blocks([], [], []).check(0, 2, "embeddings")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (blocks([0], [0], [5]), "covers 5 rows of embeddings where the view has 6"),
        (blocks([0, 0], [0, 2], [3, 3]), "covers some twice"),
        (blocks([0, 0], [0, 6], [6, 0]), "covers some twice"),
        (blocks([0, 2], [0, 3], [3, 3]), "names rank 2 of a module with 2 ranks"),
        (blocks([-1, 1], [0, 3], [3, 3]), "with 2 ranks"),
    ],
)
def test_blocks_that_do_not(found: RowBlocks, message: str) -> None:
    with pytest.raises(RoutingError, match=message):
        found.check(6, 2, "embeddings")


def test_blocks_are_items() -> None:
    offsets = np.array([0, 3, 5, 6], np.int64)
    assert blocks([0, 1, 0], [3, 0, 5], [2, 3, 1]).items(offsets, "embeddings").tolist() == [1, 0, 2]
    assert blocks([], [], []).items(np.zeros(1, np.int64), "embeddings").tolist() == []


@pytest.mark.parametrize("found", [blocks([0, 0], [0, 4], [4, 2]), blocks([0], [0], [6]), blocks([0], [9], [1])])
def test_blocks_that_are_no_items(found: RowBlocks) -> None:
    with pytest.raises(RoutingError, match="within an image"):
        found.items(np.array([0, 3, 5, 6], np.int64), "embeddings")
