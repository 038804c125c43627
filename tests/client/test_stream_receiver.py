"""Messages to tensors: what is well formed arrives, everything else is refused before memory is taken for it."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import zstandard
from client.fake_server import pack
from crc32c import crc32c as crc32c_of
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1 import microbatch_pb2 as mb
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainclient.stream.buffers import BufferPool, Bytes
from trainclient.stream.errors import ClientError, CorruptDataError, CutStreamError, ProtocolError
from trainclient.stream.microbatch import Cursor, read_header, read_items, read_routing, read_schedules, read_table
from trainclient.stream.receiver import Head, chunk_content, receive_head, receive_tensors

MAX_BYTES = 1 << 20


class CountingPool:
    """Refuses to give more than the limit: what the table announces must have been checked before."""

    def __init__(self) -> None:
        self.taken = 0
        self._pool = BufferPool(0)

    def take(self, nbytes: int) -> Bytes:
        assert nbytes <= MAX_BYTES
        self.taken += nbytes
        return self._pool.take(nbytes)


def some_header(compress: bool = False) -> tuple[mb.MicrobatchHeader, bytes, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    arrays = {
        "patches": rng.integers(0, 4, (40, 12), np.uint8),
        "grid": rng.integers(0, 9, (3, 2), np.int32),
        "empty": np.zeros((0, 5), np.int32),
        "scalar": np.array(7, np.int32),
        "labels": rng.integers(0, 9, 100, np.int32),
    }
    header = mb.MicrobatchHeader(job_id="j", plan_hash=b"h" * 32, num_microbatches=1)
    return header, pack(header, arrays, compress=compress), arrays


def messages_of(header: mb.MicrobatchHeader, payload: bytes, chunk: int = 100) -> list[bytes]:
    chunks = [payload[i : i + chunk] for i in range(0, len(payload), chunk)]
    responses = [pb.StreamMicrobatchesResponse(header=header)]
    responses += [pb.StreamMicrobatchesResponse(chunk=c) for c in chunks]
    return [r.SerializeToString() for r in responses]


def receive(messages: Iterator[bytes]) -> dict[str, np.ndarray]:
    head = receive_head(messages)
    assert isinstance(head, Head)
    table = read_table(head.header, MAX_BYTES)
    read_header(head.header, table)
    return receive_tensors(messages, table, CountingPool())


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("chunk", [1, 127, 128, 1000, 100_000])
def test_tensors_arrive(compress: bool, chunk: int) -> None:
    header, payload, arrays = some_header(compress)
    assert any(t.codec == mb.CODEC_ZSTD for t in header.tensors) is compress
    received = receive(iter(messages_of(header, payload, chunk)))
    assert received.keys() == arrays.keys()
    for name, array in arrays.items():
        assert received[name].dtype == array.dtype
        np.testing.assert_array_equal(received[name], array)
        assert received[name].ctypes.data % 64 == 0


def test_tensors_of_one_microbatch_share_one_buffer() -> None:
    header, payload, _ = some_header()
    received = receive(iter(messages_of(header, payload)))
    assert len({id(a.base) for a in received.values()}) == 1


@given(st.binary(max_size=70_000))
def test_chunks_are_found_as_protobuf_finds_them(content: bytes) -> None:
    message = pb.StreamMicrobatchesResponse(chunk=content).SerializeToString()
    assert chunk_content(message).tobytes() == content


@settings(max_examples=300)
@given(st.binary(max_size=40))
@example(b"\n")
@example(b"\n\x80")
def test_no_bytes_break_the_chunk_parser(message: bytes) -> None:
    try:
        content = chunk_content(message)
    except ProtocolError:
        return
    assert pb.StreamMicrobatchesResponse.FromString(message).chunk == content.tobytes()


@settings(max_examples=300)
@given(st.integers(0, 5000), st.integers(1, 255), st.booleans())
def test_a_flipped_bit_never_arrives(position: int, flip: int, compress: bool) -> None:
    header, payload, _ = some_header(compress)
    messages = messages_of(header, payload)
    lengths = np.cumsum([len(m) for m in messages])
    position %= int(lengths[-1])
    index = int(np.searchsorted(lengths, position, side="right"))
    where = position - int(lengths[index] - len(messages[index]))
    broken = bytearray(messages[index])
    broken[where] ^= flip
    messages[index] = bytes(broken)
    if index > 0:  # the header has no checksum of its own; its contradictions are tested below
        with pytest.raises((CorruptDataError, ProtocolError, CutStreamError)):
            receive(iter(messages))


@settings(max_examples=300)
@given(st.data())
def test_mutated_headers_raise_nothing_unexpected(data: st.DataObject) -> None:
    header, payload, _ = some_header(data.draw(st.booleans()))
    tensor = header.tensors[data.draw(st.integers(0, 4))]
    number = data.draw(st.one_of(st.integers(0, 2**63 - 1), st.integers(0, 2000)))
    match data.draw(st.sampled_from(["offset", "encoded", "raw", "shape", "dtype", "codec", "total"])):
        case "offset":
            tensor.offset = number
        case "encoded":
            tensor.encoded_bytes = number
        case "raw":
            tensor.raw_bytes = number
        case "shape":
            tensor.shape.append(number - 5)
        case "dtype":
            tensor.dtype = number % 9
        case "codec":
            tensor.codec = number % 3
        case "total":
            header.total_bytes = number
    with contextlib.suppress(ClientError):
        received = receive(iter(messages_of(header, payload)))
        assert all(a.nbytes == t.raw_bytes for a, t in zip(received.values(), header.tensors, strict=True))


def changed(**fields: object) -> mb.MicrobatchHeader:
    header, _, _ = some_header()
    for name, value in fields.items():
        setattr(header.tensors[0] if hasattr(header.tensors[0], name) else header, name, value)
    return header


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (changed(total_bytes=1 << 40), "at most 1048576 are taken"),
        (changed(raw_bytes=1 << 40), "481036337152|480 are required"),
        (changed(offset=1), "no multiple of 64"),
        (changed(offset=1 << 20), "overlaps"),
        (changed(encoded_bytes=3), "not compressed"),
        (changed(dtype=99), "unknown type 99"),
        (changed(codec=7), "unknown codec"),
        (changed(name="grid"), "not unique"),
    ],
)
def test_contradictions_of_the_table_are_named(header: mb.MicrobatchHeader, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        read_table(header, MAX_BYTES)


def test_decoded_bytes_are_bounded() -> None:
    header = mb.MicrobatchHeader()
    payload = pack(header, {"zeros": np.zeros((1 << 21,), np.uint8)}, compress=True)
    assert len(payload) < 1000
    with pytest.raises(ProtocolError, match="2097152 bytes, at most 1048576"):
        read_table(header, MAX_BYTES)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"no frame",
        zstandard.ZstdCompressor().compress(bytes(481)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(480)),
        zstandard.ZstdCompressor().compress(bytes(480))[:-2],
    ],
)
def test_frames_that_lie_are_refused(frame: bytes) -> None:
    header = mb.MicrobatchHeader()
    entry = header.tensors.add(name="x", dtype=mb.DATA_TYPE_UINT8, shape=[480], codec=mb.CODEC_ZSTD)
    entry.encoded_bytes, entry.raw_bytes = len(frame), 480
    header.total_bytes = len(frame)
    header.crc32c = crc32c_of(frame)
    messages = iter(messages_of(header, frame))
    receive_head(messages)
    with pytest.raises(ProtocolError, match="tensor x"):
        receive_tensors(messages, read_table(header, MAX_BYTES), CountingPool())


def test_wrong_sequences_of_messages() -> None:
    header, payload, _ = some_header()
    messages = messages_of(header, payload)
    with pytest.raises(CutStreamError, match="between microbatches"):
        receive(iter([]))
    with pytest.raises(CutStreamError, match="after 200 of"):
        receive(iter(messages[:3]))
    with pytest.raises(ProtocolError, match="where a header"):
        receive(iter(messages[1:]))
    with pytest.raises(ProtocolError, match="where a chunk"):
        receive(iter([messages[0], messages[0]]))
    with pytest.raises(ProtocolError, match="empty message"):
        receive(iter([b""]))
    with pytest.raises(ProtocolError, match="cannot be parsed"):
        receive(iter([b"\xff\xff\xff"]))
    with pytest.raises(ProtocolError, match="are missing"):
        receive(iter([messages[0], pb.StreamMicrobatchesResponse(chunk=payload + b"x").SerializeToString()]))


def test_items_and_routings_must_be_parallel() -> None:
    with pytest.raises(ProtocolError, match="item arrays"):
        read_items(mb.Items(dataset=[1], sample=[1, 2]))
    with pytest.raises(ProtocolError, match="routing arrays"):
        read_routing(mb.Routing(source_rank=[1], rows=[1, 2]))
    for wrong in ({"in_flight": [2, 0], "chunks": 1}, {"in_flight": [], "chunks": 1}, {"in_flight": [2], "chunks": 0}):
        with pytest.raises(ProtocolError, match="schedules"):
            read_schedules(mb.MicrobatchHeader(schedules=[mb.ModuleSchedule(module="llm", **wrong)]))


def test_cursor_order() -> None:
    assert Cursor(3, 0).after(2) == Cursor(3, 1)
    assert Cursor(3, 1).after(2) == Cursor(4, 0)
    assert Cursor(3, 1) < Cursor(4, 0)
