"""Memory of a server on this machine, which is mapped instead of receiving bytes: the shared-memory transport.

The server says where it shares memory (`GetServerInfoResponse.memory_socket`); `SharedBlock` describes the messages.
One connection serves one stream. A block is mapped when it comes, and returned when nothing looks at the microbatch in
it.

A fork shares what is mapped here, and nobody knows what it looks at: what is mapped when a process forks is not
returned, and its bytes stay as they are in both, as those in the process's own memory do.
"""

import fcntl
import mmap
import os
import re
import secrets
import socket
import struct
import threading
import time
import weakref
from contextlib import ExitStack, suppress
from typing import Final

import numpy as np

from trainclient.stream.buffers import Bytes
from trainclient.stream.errors import ProtocolError

MAX_BLOCKS: Final = 256
"""Mapped at once; a server has fewer."""

UNSAID: Final = 2
SAY_EVERY_S: Final = 0.2
"""While more than `UNSAID` blocks are in use beyond those returned, returns are said together: by the first one after
this time, or when the stream receives the next microbatch. To say something wakes the server, and where cores are busy
whoever wakes another thread may lose its own core to it, for some milliseconds."""

_NAME: Final = re.compile("disttrain-[0-9a-f]{32}")
_HELLO: Final = struct.Struct("<16sQ")
_BLOCK: Final = struct.Struct("<IQ")
_RETURNED: Final = struct.Struct("<I")
_HUNGRY: Final = struct.Struct("<II")
"""0xffffffff, and how many blocks had come when nothing was left to read."""
_MOST_BYTES: Final = 1 << 62
_MOST_MESSAGES: Final = 4 * MAX_BLOCKS
"""Read at once, more than a socket holds: a server that never stops must not hold this client up."""

_forks = 0
"""Number of forks between the first process and this one."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(before=_count_fork)


class MappedBlocks:
    """The blocks that one stream's server shares. One thread calls it, but for `ask`; any may drop what it took."""

    @classmethod
    def of(cls, name: str, limit_bytes: int, *, stays: bool) -> "MappedBlocks | None":
        """Ask for memory; None where the server shares none, or is on another machine or another user's.

        Args:
            name: of the server's socket.
            limit_bytes: to be shared at most.
            stays: whether microbatches stay in shared memory, and are not copied to where their owner wants them.
        """
        if not _NAME.fullmatch(name) or not hasattr(fcntl, "F_GET_SEALS"):
            return None
        token = secrets.token_bytes(16)
        with suppress(OSError), ExitStack() as undo:  # also where there is no descriptor left
            connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connection.setblocking(False)
            connection.connect(f"\0{name}")
            connection.send(_HELLO.pack(token, min(limit_bytes, _MOST_BYTES)))
            undo.pop_all()
            return cls(connection, token, stays)
        return None

    def __init__(self, connection: socket.socket, token: bytes, stays: bool) -> None:
        self.token = token
        """By which the server knows whose stream it is."""
        self.stays = stays
        self._connection = connection
        self._blocks: dict[int, mmap.mmap] = {}
        self._shared: set[int] = set()
        self._taken = 0
        self._unsaid: list[bytes] = []
        """Returns come before what is said of what is left."""
        self._said_at = 0.0
        """When something was said last, on the monotonic clock."""
        self._saying = threading.RLock()
        """Held while something is said, so that no descriptor is closed under it. A finalizer may run at any allocation
        of any thread, also of one that holds this."""

    def take(self, number: int, nbytes: int) -> Bytes:
        """The first bytes of a block, uint8 [nbytes], which is returned when nothing views them any more.

        Raises:
            ProtocolError: there is no such block, it is smaller, or it was not returned.
        """
        self._read_blocks()
        block = self._blocks.get(number)
        if block is None or len(block) < nbytes or number in self._shared:
            found = "none such" if block is None else f"{len(block)} bytes{' in use' * (number in self._shared)}"
            raise ProtocolError(f"it shared {nbytes} bytes in block {number}; this client has {found}")
        self._shared.add(number)
        self._taken = (self._taken + 1) % (1 << 32)
        # numpy follows the bases of views only through arrays: all views of this array keep it alive, as in `buffers`.
        array = np.frombuffer(memoryview(block), np.uint8, nbytes)
        weakref.finalize(array, self._return, number, _forks).atexit = False
        return array

    def ask(self) -> None:
        """Say that nothing is left to read: one more comes then, whatever is kept. Any thread may call it."""
        self._unsaid.append(_HUNGRY.pack(0xFFFFFFFF, self._taken))
        self.say()

    def close(self) -> None:
        """Ask for nothing more; what was taken stays."""
        with self._saying:
            self._connection.close()
        self._blocks.clear()

    def _return(self, number: int, forks: int) -> None:
        """Say so at once where the stream may wait for it, else with others."""
        if forks == _forks:
            self._shared.discard(number)
            self._unsaid.append(_RETURNED.pack(number))
            if len(self._unsaid) + UNSAID >= len(self._shared) or time.monotonic() > self._said_at + SAY_EVERY_S:
                self.say()

    def say(self) -> None:
        """Say what was returned. Any thread may call it."""
        with suppress(OSError), self._saying:  # nobody wants to hear it any more
            while self._unsaid:
                said = self._unsaid.pop(0)  # at once: any call in between may collect garbage, and that says it all
                self._said_at = time.monotonic()
                try:
                    self._connection.send(said)
                except BlockingIOError:  # the server has not listened for long; it goes with the next
                    self._unsaid.insert(0, said)
                    return

    def _read_blocks(self) -> None:
        """Map what has come, and drop what is not used any more."""
        for _ in range(_MOST_MESSAGES):
            try:
                message, descriptors, _, _ = socket.recv_fds(self._connection, _BLOCK.size + 1, 1)
            except ConnectionResetError:  # once, where the server left without reading all; what it said comes next
                continue
            except OSError:  # nothing has come, or the connection is lost
                return
            if not message:
                return
            try:
                self._read_block(message, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _read_block(self, message: bytes, descriptors: list[int]) -> None:
        if len(message) != _BLOCK.size:
            raise ProtocolError(f"it described a block in {len(message)} bytes, {_BLOCK.size} are required")
        number, nbytes = _BLOCK.unpack(message)
        if nbytes == 0:
            self._blocks.pop(number, None)
            return
        if len(descriptors) != 1 or number in self._blocks or len(self._blocks) >= MAX_BLOCKS:
            raise ProtocolError(
                f"it shared block {number} with {len(descriptors)} descriptors beside {len(self._blocks)} others; one "
                f"descriptor, a number of its own and at most {MAX_BLOCKS} blocks are required"
            )
        self._blocks[number] = _mapped(descriptors[0], number, nbytes)


def _mapped(descriptor: int, number: int, nbytes: int) -> mmap.mmap:
    """Memory that cannot go away while it is looked at."""
    try:
        size, sealed = os.fstat(descriptor).st_size, fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if size != nbytes or not sealed:
            raise ProtocolError(f"block {number} has {size} bytes that may shrink; {nbytes} sealed ones are required")
        return mmap.mmap(descriptor, nbytes)
    except (OSError, ValueError) as error:
        raise ProtocolError(f"block {number} of {nbytes} bytes cannot be mapped: {error}") from None
