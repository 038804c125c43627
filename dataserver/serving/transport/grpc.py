"""The gRPC transport: microbatches are made in memory of this server, and copied once into messages of 1 MiB."""

import threading
from typing import Final

from dataserver.serving.stream_memory import Account, BufferPool, size_class
from dataserver.serving.transport.interface import EncodedMicrobatch, Memory
from dataserver.varints import varint

CHUNK_BYTES: Final = 1 << 20

_CHUNK_TAG: Final = b"\x12"
"""Field 2 of StreamMicrobatchesResponse, length-delimited."""


class GrpcTransport:
    """Sends the bytes of microbatches to one consumer.

    One microbatch lies in the stream's own reserve. The memory of all others is taken from the budget that streams
    share.
    """

    sends_payload = True

    def __init__(self, account: Account, buffers: BufferPool) -> None:
        self._account = account
        self._buffers = buffers
        self._lock = threading.Lock()
        """Locks of the account and of the pool are taken under it."""
        self._in_reserve: Memory | None = None

    def reserve(self, num_bytes: int) -> bool:
        """Have a reserve for microbatches of so many bytes; False where there is no memory left for it."""
        return self._account.reserve(size_class(num_bytes))

    def memory(self, num_bytes: int) -> Memory | None:
        """Memory of this server alone, in the reserve if that is free."""
        with self._lock:
            reserved, capacity = self._in_reserve is None, size_class(num_bytes)
            if not reserved and not self._account.take(capacity):
                return None
            try:
                memory = Memory(self, self._buffers.take(num_bytes))
            except MemoryError:
                if not reserved:
                    self._account.give(capacity)
                raise
            if reserved:
                self._in_reserve = memory
            return memory

    def give(self, memory: Memory) -> None:
        """Take memory back, for the next microbatch of any stream."""
        with self._lock:
            if self._in_reserve is memory:
                self._in_reserve = None
            else:
                self._account.give(memory.buffer.nbytes)
        self._buffers.give(memory.buffer)

    def wait_until_wanted(self, _memory: Memory, _timeout_s: float) -> bool:
        """Always wanted: gRPC itself takes no further message while the consumer's window is full."""
        return True

    def num_messages(self, encoded: EncodedMicrobatch) -> int:
        """Number of chunks of the payload."""
        return -(-encoded.payload.nbytes // CHUNK_BYTES)

    def message(self, _memory: Memory, encoded: EncodedMicrobatch, i: int) -> bytes:
        """A chunk. It is put together here, so that tensor data is copied once instead of put through protobuf."""
        part = encoded.payload[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES].data
        return b"".join((_CHUNK_TAG, varint(part.nbytes), part))
