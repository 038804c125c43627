"""A network between clients and one server that can freeze, lose, delay or reset what passes through it."""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

PIECE_BYTES = 1 << 16
CLOSED = b""


class Mode(Enum):
    """What happens to bytes, in both directions."""

    PASS = auto()
    FREEZE = auto()
    """Nothing moves, nothing is lost: a stopped process, or packets that are sent again when the network is back."""
    DROP = auto()
    """Everything is taken and thrown away, also the end of a connection: a peer that vanished."""
    RESET = auto()
    """Open connections are reset, and new ones as soon as they are there."""


class Relay:
    """Listens on a loopback port and passes everything on to one address."""

    def __init__(self, target: str, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen.

        Args:
            target: where everything goes.
            host: of the loopback device.
            port: 0 takes a free one.
        """
        target_host, target_port = target.rsplit(":", 1)
        self._target = (target_host, int(target_port))
        self._mode = Mode.PASS
        self._delay_s = 0.0
        self._left: int | None = None
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Condition()
        self._writers: set[asyncio.StreamWriter] = set()
        self._lossy: set[asyncio.StreamWriter] = set()
        """Of these connections bytes are missing: they are reset when the network is back."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._connected, host, port, limit=PIECE_BYTES))
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def set(self, mode: Mode, *, delay_s: float = 0.0, after_bytes: int | None = None) -> None:
        """Change what happens from now on.

        Args:
            mode: what happens.
            delay_s: how much later each piece is passed on.
            after_bytes: bytes towards clients that still pass before the mode holds: the middle of a chunk.
        """
        self._call(self._set(mode, delay_s, after_bytes))

    def close(self) -> None:
        """Reset all connections and end."""
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _set(self, mode: Mode, delay_s: float, after_bytes: int | None) -> None:
        async with self._changed:
            self._mode, self._delay_s, self._left = mode, delay_s, after_bytes
            if after_bytes is None:
                self._reset(self._writers if mode is Mode.RESET else self._lossy)
            self._changed.notify_all()

    async def _end(self) -> None:
        self._server.close()
        self._reset(self._writers)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        self._writers.add(writer)
        try:
            await self._passing()
            if self._mode is Mode.RESET:
                return
            upstream, server = await asyncio.open_connection(*self._target, limit=PIECE_BYTES)
            writers.append(server)
            self._writers.add(server)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, server, writers))
                pumps.create_task(self._pump(upstream, writer, writers, towards_client=True))
        except* (OSError, asyncio.CancelledError):  # one side was reset, so is the other; or the relay ends
            pass
        finally:
            self._reset(writers)
            self._writers.difference_update(writers)
            self._lossy.difference_update(writers)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        both: "list[asyncio.StreamWriter]",
        *,
        towards_client: bool = False,
    ) -> None:
        while True:
            piece = await reader.read(PIECE_BYTES)
            await asyncio.sleep(self._delay_s)
            if towards_client and self._left is not None:
                before, piece = piece[: self._left], piece[self._left :]
                self._left -= len(before)
                writer.write(before)
                if not piece:
                    continue
                await self._set(self._mode, self._delay_s, None)
            await self._passing()
            if self._mode is Mode.DROP and self._left is None:
                self._lossy.update(both)
                if piece == CLOSED:
                    return
                continue
            if piece == CLOSED:  # behind what is still on its way
                writer.write_eof()
                return
            writer.write(piece)
            await writer.drain()

    async def _passing(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._mode is not Mode.FREEZE or self._left is not None)

    def _reset(self, writers: "set[asyncio.StreamWriter] | list[asyncio.StreamWriter]") -> None:
        for writer in tuple(writers):
            connection = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):  # it is closed already
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


@contextmanager
def relayed(target: str) -> Iterator[Relay]:
    """A relay to an address, ended with the block."""
    relay = Relay(target)
    try:
        yield relay
    finally:
        relay.close()
