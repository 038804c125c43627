"""From the messages of a stream to tensors: one copy, out of each gRPC message into a recycled buffer.

Where a server shares its memory, the message only says where the bytes lie, and there is no copy; nor is there one
of ours where they come over a data connection.

Messages arrive as they are on the wire. A chunk is one `bytes` field, so its content is found by hand, without the copy
that a protobuf parser makes; everything else is parsed. Sizes are checked before memory is taken for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import zstandard
from crc32c import crc32c as crc32c_of
from disttrain.v1.data_service_pb2 import DirectOffer, EndOfStream, StreamMicrobatchesResponse
from disttrain.v1.microbatch_pb2 import MicrobatchHeader
from google.protobuf.message import DecodeError

from dataserver.planning.plan.views import aligned
from trainclient.stream.buffers import Buffers, Bytes
from trainclient.stream.errors import ClientError, CorruptDataError, CutStreamError, ProtocolError
from trainclient.stream.microbatch import Array, Cursor, TensorEntry, TensorTable
from trainclient.stream.shared_memory import MappedBlocks

CHUNK_TAG = 0x12
"""Tag of field 2 (`chunk`), which is length-delimited."""
END_TAG = b"\x1a"
"""Tag of field 3 (`end`)."""
LENT_TAG = b"\x22"
"""Tag of field 4 (`shared`)."""
RESTART_TAG = b"\x32"
"""Tag of field 6 (`restart`)."""
MAX_WINDOW_BYTES = 128 << 20
"""Memory that one Zstandard frame may ask for besides its content."""


class IdleEndError(ClientError):
    """The server ended the stream in the middle of a microbatch, because this client took nothing for long."""

    def __init__(self, end: EndOfStream) -> None:
        super().__init__("it ended the stream as idle in the middle of a microbatch")
        self.end = end


@dataclass(frozen=True, slots=True)
class Head:
    """What a microbatch begins with."""

    header: MicrobatchHeader
    direct: bool
    """Whether the payload comes over the data connection."""


def receive_head(messages: Iterator[bytes]) -> Head | DirectOffer | EndOfStream:
    """The next header, the orderly end, or before them an offer.

    Raises:
        CutStreamError: the stream is over without an end message.
        ProtocolError: something else came.
    """
    response = _parsed(_next(messages, "between microbatches"))
    match response.WhichOneof("message"):
        case "header":
            return Head(response.header, response.direct)
        case "end":
            return response.end
        case "offer":
            return response.offer
        case other:
            raise ProtocolError(f"it sent {other or 'an empty message'} where a header or the end is required")


def skip_to_restart(messages: Iterator[bytes], wanted: Cursor) -> None:
    """Throw away what was sent before a stream began again.

    Args:
        messages: of the stream.
        wanted: where it is to begin.

    Raises:
        CutStreamError: the stream is over.
        IdleEndError: the server ended it, because nothing was taken.
        ProtocolError: it began elsewhere.
    """
    while True:
        message = _next(messages, "before it began again")
        if message[:1] == END_TAG:
            end = _parsed(message).end
            if end.reason == EndOfStream.REASON_IDLE:
                raise IdleEndError(end)
            raise CutStreamError("the stream ended before it began again")
        if message[:1] == RESTART_TAG:
            found = _parsed(message).restart
            if (found.step, found.microbatch) != (wanted.step, wanted.microbatch):
                raise ProtocolError(f"it began again at {found.step, found.microbatch}, and {wanted} was asked for")
            return


def receive_tensors(
    messages: Iterator[bytes], table: TensorTable, buffers: Buffers, mapped: MappedBlocks | None = None
) -> dict[str, Array]:
    """The tensors that follow a header.

    Args:
        messages: of the stream, behind the header.
        table: that of the header.
        buffers: where their bytes are put.
        mapped: where they may lie already, instead of chunks; None if no memory was asked for.

    Raises:
        CorruptDataError: the checksum differs.
        CutStreamError: the stream is over before the last chunk.
        IdleEndError: the server ended it, because nothing was taken.
        ProtocolError: more or other bytes came than the table announces.
    """
    return as_tensors(_received(messages, table, buffers, mapped), table, buffers)


def as_tensors(received: Bytes, table: TensorTable, buffers: Buffers) -> dict[str, Array]:
    """The tensors of a microbatch whose encoded bytes are there.

    Args:
        received: uint8 [total_bytes].
        table: that of the header.
        buffers: where they are decoded, if they are compressed.

    Raises:
        ProtocolError: they cannot be decoded.
    """
    if not table.compressed:
        return {e.name: _view(received, e, e.offset) for e in table.entries}
    decoded = buffers.take(table.raw_bytes)
    tensors, start = {}, 0
    for entry in table.entries:
        start = aligned(start)
        target = decoded[start : start + entry.raw_bytes]
        source = received[entry.offset : entry.offset + entry.encoded_bytes]
        if entry.compressed:
            _decompress(entry.name, source, target)
        else:
            target[:] = source
        tensors[entry.name] = _view(decoded, entry, start)
        start += entry.raw_bytes
    return tensors


def chunk_content(message: bytes) -> Bytes:
    """The bytes of a chunk message, as a view of it.

    Raises:
        ProtocolError: it is no chunk, or holds more than one field.
    """
    if not message or message[0] != CHUNK_TAG:
        raise ProtocolError("it sent another message where a chunk is required")
    length = shift = 0
    for position in range(1, min(len(message), 6)):
        length |= (message[position] & 0x7F) << shift
        shift += 7
        if message[position] < 0x80:
            break
    else:
        raise ProtocolError("it sent a chunk whose length cannot be read")
    if position + 1 + length != len(message):
        raise ProtocolError(f"it sent a chunk of {length} bytes in a message of {len(message)}")
    return np.frombuffer(message, np.uint8, length, position + 1)


def _received(messages: Iterator[bytes], table: TensorTable, buffers: Buffers, mapped: MappedBlocks | None) -> Bytes:
    """All bytes of a microbatch, as they were encoded."""
    if mapped is None or table.total_bytes == 0:
        return _receive_chunks(messages, table, buffers)
    message = _next(messages, f"before {table.total_bytes} bytes of a microbatch")
    if message[:1] != LENT_TAG:
        return _receive_chunks(chain([message], messages), table, buffers)
    block = mapped.take(_parsed(message).shared.number, table.total_bytes)
    if mapped.stays:
        return block
    buffer = buffers.take(table.total_bytes)
    buffer[:] = block
    return buffer


def _receive_chunks(messages: Iterator[bytes], table: TensorTable, buffers: Buffers) -> Bytes:
    buffer = buffers.take(table.total_bytes)
    done = checksum = 0
    while done < table.total_bytes:
        message = _next(messages, f"after {done} of {table.total_bytes} bytes of a microbatch")
        if message[:1] == END_TAG and (end := _parsed(message).end).reason == EndOfStream.REASON_IDLE:
            raise IdleEndError(end)
        chunk = chunk_content(message)
        if not 0 < len(chunk) <= table.total_bytes - done:
            raise ProtocolError(f"it sent a chunk of {len(chunk)} bytes where {table.total_bytes - done} are missing")
        checksum = crc32c_of(chunk.data, checksum)
        buffer[done : done + len(chunk)] = chunk
        done += len(chunk)
    if checksum != table.crc32c:
        raise CorruptDataError(
            f"the bytes of a microbatch have CRC-32C {checksum:08x}, its header says {table.crc32c:08x}"
        )
    return buffer


def _decompress(name: str, source: Bytes, target: Bytes) -> None:
    """Decode one frame that must fill `target` exactly."""
    try:
        size = zstandard.get_frame_parameters(source.data).content_size
        if size != target.nbytes:
            raise ProtocolError(f"tensor {name} holds a frame of {size} bytes, {target.nbytes} are required")
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        with decompressor.stream_reader(source.data) as reader:
            done = 0
            while count := reader.readinto(target[done:].data):
                done += count
    except zstandard.ZstdError as error:
        raise ProtocolError(f"tensor {name} cannot be decoded: {error}") from None
    if done != target.nbytes:
        raise ProtocolError(f"tensor {name} decodes to {done} bytes, {target.nbytes} are required")


def _view(buffer: Bytes, entry: TensorEntry, start: int) -> Array:
    return buffer[start : start + entry.raw_bytes].view(entry.dtype).reshape(entry.shape)


def _parsed(message: bytes) -> StreamMicrobatchesResponse:
    try:
        return StreamMicrobatchesResponse.FromString(message)
    except DecodeError as error:
        raise ProtocolError(f"it sent a message that cannot be parsed: {error}") from None


def _next(messages: Iterator[bytes], where: str) -> bytes:
    message = next(messages, None)
    if message is None:
        raise CutStreamError(f"the stream ended {where}, without an end message")
    return message
