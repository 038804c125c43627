"""The shared-memory transport: clients on this machine map the block that holds a microbatch, and no bytes are sent.

A client of the server's own user connects to a Unix socket in Linux's abstract namespace, which those share who share
a loopback device, and says a token. The stream that it asks for with this token shares blocks with it: anonymous memory
whose descriptors went through the socket, each mapped once on both sides and used again when the client says that
nothing looks at it any more. A block belongs to one client for ever: whatever that still writes into it, no other one
reads.

Nothing waits here, and nothing is owed to a client that is gone: its blocks are let go, and live until it unmaps them.
"""

import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from dataserver.serving.memory import Account, Buffer, size_class

MIN_SHARED_BYTES: Final = 64 << 10
"""Smaller microbatches are sent: a page of their own would cost more than the copy."""
MAX_SHARED: Final = 20
"""Blocks that one client looks at while it has some left to read: as many as its queue holds, and some more that a
trainer looks at."""
MAX_IDLE: Final = 8
"""Blocks of one client that wait to be used again."""
MAX_BLOCKS: Final = 512
"""Blocks of all clients: each takes a descriptor, and most systems permit a process 1,024 of them."""
MAX_PENDING: Final = 256
"""Connections whose stream was not asked for yet; the oldest is closed for one more."""

_HELLO: Final = struct.Struct("<16sQ")
"""Of a client, first and once: its token, and how many bytes it wants at most."""
_BLOCK: Final = struct.Struct("<IQ")
"""Of the server: the number of a block, and its bytes, with its descriptor; 0 bytes without one where it is dropped."""
_RETURNED: Final = struct.Struct("<I")
"""Of the client: the number of a block that nothing looks at any more."""
_HUNGRY: Final = struct.Struct("<II")
"""Of the client: 0xffffffff, nothing is left to read; how many blocks it had been given by then, modulo 2^32."""
_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group at the other end, as SO_PEERCRED has them."""
_SEALS: Final = 0 if not hasattr(fcntl, "F_SEAL_SEAL") else fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Memory that one client can see."""

    number: int
    buffer: Buffer
    """uint8 [capacity]."""


class SharedMemoryListener:
    """Where clients of this machine come for memory. Thread-safe."""

    def __init__(self, wanted: bool) -> None:
        """Listen, if it is wanted and the system has what it takes: Linux does."""
        self.name = ""
        """Of the socket in the abstract namespace; empty where there is none."""
        self._blocks_left = threading.Semaphore(MAX_BLOCKS)
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, tuple[bytes, int] | None] = {}
        """Connections that belong to no stream yet, with what they said, oldest first."""
        self._listener: socket.socket | None = None
        if wanted and hasattr(os, "memfd_create") and _SEALS:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            self.name = f"disttrain-{secrets.token_hex(16)}"
            self._listener.bind(f"\0{self.name}")
            self._listener.listen(MAX_PENDING)

    def consumer(self, token: bytes, account: Account) -> "SharedMemoryConsumer | None":
        """The client that has said this token on a connection, which it did before it asked for its stream.

        Args:
            token: of the request for the stream.
            account: from which the blocks are taken.
        """
        if not token:
            return None
        with self._lock:
            self._accept()
            for connection in tuple(self._waiting):
                said = self._hello(connection)
                if said is not None and secrets.compare_digest(said[0], token):
                    del self._waiting[connection]
                    return SharedMemoryConsumer(connection, said[1], account, self._blocks_left)
        return None

    def close(self) -> None:
        """Take no further clients."""
        with self._lock:
            for connection in (*self._waiting, *filter(None, [self._listener])):
                connection.close()
            self._waiting.clear()
            self._listener = None

    def _accept(self) -> None:
        """Take in all who have come, as far as there are descriptors."""
        with suppress(OSError):
            while self._listener is not None:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(peer)[1] != os.geteuid():
                    connection.close()
                    continue
                self._waiting[connection] = None
                if len(self._waiting) > MAX_PENDING:
                    self._forget(next(iter(self._waiting)))

    def _hello(self, connection: socket.socket) -> tuple[bytes, int] | None:
        """What a connection has said first, if anything; one that said something else, or is gone, is closed."""
        try:
            message = connection.recv(_HELLO.size + 1)
        except BlockingIOError:
            return self._waiting[connection]
        except OSError:
            message = b""
        if len(message) != _HELLO.size:
            self._forget(connection)
            return None
        token, limit = _HELLO.unpack(message)
        self._waiting[connection] = (token, limit)
        return token, limit

    def _forget(self, connection: socket.socket) -> None:
        del self._waiting[connection]
        connection.close()


class SharedMemoryConsumer:
    """The client of one stream, and the blocks that were made for it, on the stream's account. Not thread-safe."""

    def __init__(
        self, connection: socket.socket, limit_bytes: int, account: Account, blocks_left: threading.Semaphore
    ) -> None:
        self._connection: socket.socket | None = connection
        self._limit_bytes = limit_bytes
        self._account = account
        self._blocks_left = blocks_left
        self._next = 0
        self._told = 0
        """How many blocks the client was given, modulo 2^32."""
        self._sizes: dict[int, int] = {}
        """Of all blocks that there are, by number."""
        self._made: set[int] = set()
        """Numbers of those that the stream has."""
        self._shared: dict[int, Block] = {}
        """Those that the client looks at, by number: also while the stream, which tells it to, still has them."""
        self._idle: list[Block] = []
        """Those returned longest ago come first."""
        self._largest = 0
        """Bytes of the largest microbatch for which a block was made."""
        self._is_hungry = False
        """Whether the client has nothing left to read, by what it said since it was given something."""
        self._keeps = False
        """Whether that was so when it had as much as it wants: it keeps what it has, or a fork does."""

    def block(self, num_bytes: int) -> Block | None:
        """A block for a microbatch; None for a small one, or where the client keeps as much as it wants, or is gone."""
        self._take_back()
        block = self._fitting(num_bytes)
        if block is not None:
            self._made.add(block.number)
        return block

    def wants(self, block: Block) -> bool:
        """Whether the client wants to look at this one beside those that it has.

        Whatever it keeps, it is given one more when it has nothing left to read.
        """
        self._take_back()
        nobody = self._limit_bytes == 0
        return nobody or not self._shared or self._is_hungry or not self._is_full(block.buffer.nbytes)

    def wait(self, timeout_s: float) -> None:
        """Wait until the client says something, or is gone; at most so long. Any thread may call it."""
        connection = self._connection
        descriptor = -1 if connection is None else connection.fileno()
        if descriptor >= 0:  # else it was closed meanwhile
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(timeout_s * 1e3)

    def share(self, block: Block) -> None:
        """The client is told to look at it."""
        self._is_hungry = False
        if self._connection is not None:
            self._told = (self._told + 1) % (1 << 32)
            self._shared[block.number] = block

    def give(self, block: Block) -> None:
        """Have a block used again, as soon as the client does not look at it either."""
        self._made.discard(block.number)
        self._reuse(block)

    def close(self) -> None:
        """Let go of all blocks; what the client looks at stays as it is."""
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

    def _fitting(self, num_bytes: int) -> Block | None:
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
        roomy = size_class(max(num_bytes, min(self._largest, num_bytes * 5 // 4)))
        fresh = self._new(roomy) or self._new(size_class(num_bytes))
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

    def _reuse(self, block: Block) -> None:
        """Keep a block for later, if nobody has it; not more of them than are useful, or than are this stream's."""
        if block.number in self._made or block.number in self._shared or self._connection is None:
            return
        self._idle.append(block)
        if len(self._idle) > MAX_IDLE or self._account.exceeds_share(block.buffer.nbytes):
            self._drop(self._idle.pop(0))

    def _new(self, num_bytes: int) -> Block | None:
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
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)  # else a client could have this process killed
            mapped = mmap.mmap(memory.fileno(), num_bytes)
            if self._say(_BLOCK.pack(number, num_bytes), memory.fileno()):
                return Block(number, np.frombuffer(mapped, np.uint8))
        self._forget(number)
        return None

    def _drop(self, block: Block) -> None:
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
