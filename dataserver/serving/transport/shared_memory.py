"""The shared-memory transport: a client on this machine maps the block that holds a microbatch, and no bytes are sent.

Blocks are anonymous memory whose descriptors went through a Unix socket (`shared_memory_listener`). Each is mapped once
on both sides, and used again when the client says that nothing looks at it any more. A block belongs to one client for
ever: whatever that still writes into it, no other one reads.

Nothing waits for a client, and nothing is owed to one that is gone: its blocks are let go, and live until it unmaps
them.
"""

import fcntl
import mmap
import os
import select
import socket
import struct
import threading
from contextlib import suppress
from typing import Final

import numpy as np
from disttrain.v1 import data_service_pb2

from dataserver.serving.stream_memory import Account, BufferPool, size_class
from dataserver.serving.transport.interface import EncodedMicrobatch, Memory

MIN_SHARED_BYTES: Final = 64 << 10
"""Smaller microbatches are sent: a page of their own would cost more than the copy."""
MAX_SHARED: Final = 20
"""Blocks that one client looks at while it has some left to read: as many as its queue has, and some more that a
trainer looks at."""
MAX_IDLE: Final = 8
"""Blocks of one client that wait to be used again."""
SEALS: Final = 0 if not hasattr(fcntl, "F_SEAL_SEAL") else fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""What keeps a client from changing a block's size; 0 where the system has no such thing."""

_BLOCK: Final = struct.Struct("<IQ")
"""From the server: the number of a block, and its bytes, with its descriptor; 0 bytes without one where it is
dropped."""
_RETURNED: Final = struct.Struct("<I")
"""From the client: the number of a block that nothing looks at any more."""
_HUNGRY: Final = struct.Struct("<II")
"""From the client: 0xffffffff, nothing is left to read; how many blocks it had been given by then, modulo 2^32."""


class SharedMemoryTransport:
    """Shares blocks with the client of one stream, on the stream's account."""

    sends_payload = False

    def __init__(
        self,
        connection: socket.socket,
        limit_bytes: int,
        account: Account,
        buffers: BufferPool,
        blocks_left: threading.Semaphore,
    ) -> None:
        """Share nothing yet.

        Args:
            connection: to the client.
            limit_bytes: how much it wants at most.
            account: from which the blocks are taken.
            buffers: the pool that keeps as much less for reuse.
            blocks_left: how many more blocks there may be of all clients.
        """
        self._connection: socket.socket | None = connection
        self._limit_bytes = limit_bytes
        self._account = account
        self._buffers = buffers
        self._blocks_left = blocks_left
        self._lock = threading.Lock()
        """Guards what follows. The account's is taken under it."""
        self._next = 0
        self._told = 0
        """How many blocks the client was given, modulo 2^32."""
        self._sizes: dict[int, int] = {}
        """Bytes of all blocks that there are, by number."""
        self._made: set[int] = set()
        """Numbers of those that the stream has."""
        self._shared: dict[int, Memory] = {}
        """Those that the client looks at, by number: also while the stream, which tells it to, still has them."""
        self._idle: list[Memory] = []
        """Those returned longest ago come first."""
        self._largest = 0
        """Bytes of the largest microbatch for which a block was made."""
        self._is_hungry = False
        """Whether the client has nothing left to read, by what it said since it was given something."""
        self._keeps = False
        """Whether that was so when it had as much as it wants: it keeps what it has, or a fork does."""

    def memory(self, num_bytes: int) -> Memory | None:
        """A block for a microbatch; None for a small one, or where the client keeps as much as it wants, or is gone."""
        with self._lock:
            self._take_back()
            block = self._fitting(num_bytes)
            if block is not None:
                self._made.add(block.number)
        if block is not None:
            self._buffers.trim()  # the budget may have granted the block what idle buffers took
        return block

    def give(self, memory: Memory) -> None:
        """Have a block used again, as soon as the client does not look at it either."""
        with self._lock:
            self._made.discard(memory.number)
            self._reuse(memory)

    def wants(self, memory: Memory) -> bool:
        """Whether the client wants to look at this one beside those that it has.

        Whatever it keeps, it is given one more when it has nothing left to read.
        """
        with self._lock:
            self._take_back()
            nobody = self._limit_bytes == 0
            return nobody or not self._shared or self._is_hungry or not self._is_full(memory.buffer.nbytes)

    def wait_until_wanted(self, memory: Memory, timeout_s: float) -> bool:
        """Wait until the client wants this block, looking again when it says something, or is gone."""
        if self.wants(memory):
            return True
        connection = self._connection
        descriptor = -1 if connection is None else connection.fileno()
        if descriptor >= 0:  # else it was closed meanwhile
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(timeout_s * 1e3)
        return self.wants(memory)

    def share(self, memory: Memory) -> None:
        """The client is told to look at it."""
        with self._lock:
            self._is_hungry = False
            if self._connection is not None:
                self._told = (self._told + 1) % (1 << 32)
                self._shared[memory.number] = memory

    def num_messages(self, _encoded: EncodedMicrobatch) -> int:
        """The one that names the block."""
        return 1

    def message(self, memory: Memory, _encoded: EncodedMicrobatch, _i: int) -> bytes:
        """Tell the client to look at the block."""
        self.share(memory)
        shared = data_service_pb2.SharedBlock(number=memory.number)
        return data_service_pb2.StreamMicrobatchesResponse(shared=shared).SerializeToString()

    def close(self) -> None:
        """Let go of all blocks; what the client looks at stays as it is."""
        with self._lock:
            for number in tuple(self._sizes):
                self._forget(number)
            self._shared.clear()
            self._idle.clear()
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _is_full(self, more_bytes: int) -> bool:
        """Whether the client does not want so many bytes beside what it looks at."""
        return len(self._shared) >= MAX_SHARED or self._shared_bytes + more_bytes > self._limit_bytes

    @property
    def _shared_bytes(self) -> int:
        return sum(block.buffer.nbytes for block in self._shared.values())

    def _fitting(self, num_bytes: int) -> Memory | None:
        if not MIN_SHARED_BYTES <= num_bytes <= self._limit_bytes:
            return None
        if self._keeps and self._is_full(num_bytes):
            return None
        fitting = [block for block in self._idle if num_bytes <= block.buffer.nbytes <= 2 * size_class(num_bytes)]
        if fitting:
            # The one returned last: most of it is still in caches.
            block = min(reversed(fitting), key=lambda block: block.buffer.nbytes)
            self._idle.remove(block)
            return block
        # One that is too small makes way. Where sizes keep changing, all are soon large enough, and sooner as fresh
        # ones hold the largest so far: what is not touched takes no memory.
        small = next((block for block in self._idle if block.buffer.nbytes < num_bytes), None)
        if small is not None:
            self._idle.remove(small)
            self._drop(small)
        self._largest = max(self._largest, num_bytes)
        generous = size_class(max(num_bytes, min(self._largest, num_bytes * 5 // 4)))
        fresh = self._new(generous) or self._new(size_class(num_bytes))
        while fresh is None and self._idle:
            self._drop(self._idle.pop(0))
            fresh = self._new(size_class(num_bytes))
        return fresh

    def _take_back(self) -> None:
        """Take what the client has returned. One that is gone, or says something else, gets no further blocks."""
        for _ in range(2 * MAX_SHARED):
            try:
                message = b"" if self._connection is None else self._connection.recv(_HUNGRY.size + 1)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if len(message) == _HUNGRY.size:
                if message == _HUNGRY.pack(0xFFFFFFFF, self._told):  # else something is on its way to it
                    self._is_hungry = True
                    self._keeps = self._keeps or self._is_full(self._largest)
                continue
            if len(message) != _RETURNED.size:
                self._limit_bytes = 0
                return
            (number,) = _RETURNED.unpack(message)
            if (block := self._shared.pop(number, None)) is not None:  # else it returns what it does not have
                most = 2 * len(self._shared) > MAX_SHARED or 2 * self._shared_bytes > self._limit_bytes
                self._keeps = self._keeps and most
                self._reuse(block)

    def _reuse(self, block: Memory) -> None:
        """Keep a block for later, if nobody has it; not more of them than are useful, or than are this stream's."""
        if block.number in self._made or block.number in self._shared or self._connection is None:
            return
        self._idle.append(block)
        if len(self._idle) > MAX_IDLE or self._account.exceeds_share(block.buffer.nbytes):
            self._drop(self._idle.pop(0))

    def _new(self, num_bytes: int) -> Memory | None:
        """A fresh block, which the client sees from now on; None where there is no memory, or it could not be told."""
        if self._connection is None or not self._blocks_left.acquire(blocking=False):
            return None
        if not self._account.take(num_bytes):
            self._blocks_left.release()
            return None
        number, self._next = self._next, self._next + 1
        self._sizes[number] = num_bytes
        with (
            suppress(OSError),
            os.fdopen(os.memfd_create("disttrain", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)) as memory,
        ):
            os.ftruncate(memory.fileno(), num_bytes)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)  # else a client could have this process killed
            mapped = mmap.mmap(memory.fileno(), num_bytes)
            if self._say(_BLOCK.pack(number, num_bytes), memory.fileno()):
                return Memory(self, np.frombuffer(mapped, np.uint8), number)
        self._forget(number)
        return None

    def _drop(self, block: Memory) -> None:
        self._say(_BLOCK.pack(block.number, 0))
        self._forget(block.number)

    def _forget(self, number: int) -> None:
        self._account.give(self._sizes.pop(number))
        self._blocks_left.release()

    def _say(self, message: bytes, *descriptors: int) -> bool:
        """Send without waiting; whether that was possible. A client that does not listen gets no further blocks."""
        if self._connection is None:
            return False
        try:
            socket.send_fds(self._connection, [message], descriptors)
        except OSError:
            self._limit_bytes = 0
            return False
        return True
