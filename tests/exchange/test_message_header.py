"""The bytes between modules, and the blocks they are cut into."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainclient.exchange.message_header import (
    HEADER_BYTES,
    BrokerMismatchError,
    Kind,
    MessageType,
    MicrobatchId,
    decode,
    encode,
    join,
    make_header,
    split,
)
from trainclient.exchange.routing import RoutingError, RowBlocks, covering, items_of

STAMP = MicrobatchId(bytes(range(32)), step=2**40, microbatch=7)


@given(valid=st.lists(st.booleans(), max_size=200), row_bytes=st.integers(0, 2**40))
def test_round_trip(valid: list[bool], row_bytes: int) -> None:
    header = make_header(MessageType(Kind.EMBEDDINGS), STAMP, len(valid), row_bytes, 3, 5)
    microbatch_id = encode(header, torch.tensor(valid, dtype=torch.bool))
    assert microbatch_id.dtype == torch.uint8
    assert len(microbatch_id) == header.encoded_bytes
    found = decode(microbatch_id, header)
    assert found.dtype == torch.bool
    assert found.tolist() == valid


@given(
    num_valid=st.integers(0, 200),
    rows=st.integers(0, 9),
    width=st.integers(1, 9),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_stamp_and_rows_in_one(num_valid: int, rows: int, width: int, dtype: torch.dtype) -> None:
    values, valid = torch.arange(rows * width).view(rows, width).to(dtype), torch.arange(num_valid) % 3 == 0
    header = make_header(MessageType(Kind.EMBEDDINGS), STAMP, num_valid, rows * width * dtype.itemsize, 3, 5)
    message = join(header, valid, values)
    assert (message.dtype, len(message)) == (torch.uint8, header.message_bytes)
    assert header.rows_offset % HEADER_BYTES == 0
    found_valid, found = split(message, header, width, dtype)
    assert torch.equal(found_valid, valid)
    assert found.dtype == dtype
    assert torch.equal(found, values)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", int(Kind.CONDITIONS)),
        ("chunk", 3),
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
    expected = make_header(MessageType(Kind.EMBEDDINGS), STAMP, 2, 16, 3, 5)
    sent = replace(expected, **{field: value})
    microbatch_id = torch.zeros(expected.encoded_bytes, dtype=torch.uint8)
    microbatch_id[:HEADER_BYTES] = encode(sent, torch.ones(sent.num_valid, dtype=torch.bool))[:HEADER_BYTES]
    with pytest.raises(BrokerMismatchError) as error:
        decode(microbatch_id, expected)
    assert str(expected) in str(error.value)
    assert str(sent) in str(error.value)


def test_other_bytes_are_told_apart() -> None:
    header = make_header(MessageType(Kind.ACTIVATIONS), STAMP, 0, 8, 0, 1)
    with pytest.raises(BrokerMismatchError, match="no message"):
        decode(torch.full((header.encoded_bytes,), 7, dtype=torch.uint8), header)


def blocks(rank: list[int], start: list[int], rows: list[int]) -> RowBlocks:
    arrays = [np.array(column, np.int64) for column in (rank, start, rows)]
    return RowBlocks(*arrays, arrays[1])


def test_blocks_that_cover_the_rows() -> None:
    assert covering([blocks([1, 0, 1], [3, 0, 5], [2, 3, 1])], 6, "embeddings").tolist() == [0, 3, 5, 6]
    assert covering([blocks([0], [3], [2]), blocks([0], [0], [3])], 5, "embeddings").tolist() == [0, 3, 5]
    assert covering([blocks([], [], [])], 0, "embeddings").tolist() == [0]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([blocks([0], [0], [5])], "covers 5 rows of embeddings where the view has 6, or"),
        ([blocks([0], [0], [7])], "covers 7 rows of embeddings where the view has 6, or"),
        ([blocks([0, 0], [0, 2], [3, 3])], "covers some twice"),
        ([blocks([0], [0], [3]), blocks([0], [2], [3])], "covers some twice"),
        ([blocks([0, 0], [0, 6], [6, 0])], "covers some twice"),
        ([blocks([0], [1], [6])], "covers some twice"),
        ([blocks([], [], [])], "covers 0 rows of embeddings where the view has 6"),
    ],
)
def test_blocks_that_do_not(found: list[RowBlocks], message: str) -> None:
    with pytest.raises(RoutingError, match=message):
        covering(found, 6, "embeddings")


@pytest.mark.parametrize("ranks", [[0, 2], [-1, 1]])
def test_peers_that_do_not_exist(ranks: list[int]) -> None:
    found = blocks(ranks, [0, 3], [3, 3])
    with pytest.raises(RoutingError, match=f"of embeddings names rank {max(ranks)} of a module with 2 ranks; all"):
        found.check_ranks(2, "embeddings")
    blocks([0, 1], [0, 3], [3, 3]).check_ranks(2, "embeddings")
    blocks([], [], []).check_ranks(0, "embeddings")


def test_blocks_are_items() -> None:
    offsets = np.array([0, 3, 3, 5, 6], np.int64)
    assert items_of(blocks([0, 1, 0], [3, 0, 5], [2, 3, 1]), offsets, "embeddings").tolist() == [2, 0, 3]
    assert items_of(blocks([], [], []), np.zeros(1, np.int64), "embeddings").tolist() == []


@pytest.mark.parametrize(
    "found", [blocks([0, 0], [0, 4], [4, 2]), blocks([0], [0], [6]), blocks([0], [9], [1]), blocks([0], [-1], [1])]
)
def test_blocks_that_are_no_items(found: RowBlocks) -> None:
    with pytest.raises(RoutingError, match="cuts embeddings within an item"):
        items_of(found, np.array([0, 3, 5, 6], np.int64), "embeddings")
