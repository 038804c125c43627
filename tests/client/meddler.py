"""What may lie between a client and a data port: a proxy that changes, cuts or withholds what passes through it."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Meddling = Callable[[socket.socket, socket.socket], None]
"""Passes bytes on from the server to the client, or something else. The handshake has passed, if `handshake` is set."""
HELLO_BYTES, MAGIC_BYTES = 20, 4


@contextmanager
def meddler(host: str, port: int, meddling: Meddling, *, handshake: bool = True) -> Iterator[None]:
    """Listen at a port of a loopback address, in front of the same port of 127.0.0.1."""

    def serve(client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", port), 20) as server:
            open_sockets.extend((client, server))
            if handshake:
                server.sendall(client.recv(HELLO_BYTES, socket.MSG_WAITALL))
                client.sendall(server.recv(MAGIC_BYTES, socket.MSG_WAITALL))
            meddling(server, client)

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed: the end of the test
            while True:
                client, _ = listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    open_sockets: list[socket.socket] = []
    with socket.create_server((host, port)) as listener:
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for one in open_sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            accepting.join()


def passing(server: socket.socket, client: socket.socket) -> None:
    """Everything, as it is."""
    while piece := server.recv(1 << 16):
        client.sendall(piece)


def byte_by_byte(server: socket.socket, client: socket.socket) -> None:
    """Everything, in packets of one byte as far as 2,000 of them, and of odd sizes behind."""
    left = 2000
    while piece := server.recv(1 << 16):
        for i in range(min(left, len(piece))):
            client.sendall(piece[i : i + 1])
        client.sendall(piece[left:]) if left < len(piece) else None
        left = max(0, left - len(piece))


def after(count: int, then: Meddling) -> Meddling:
    """So many bytes pass; then something else happens."""

    def meddling(server: socket.socket, client: socket.socket) -> None:
        left = count
        while left and (piece := server.recv(min(left, 1 << 16))):
            client.sendall(piece)
            left -= len(piece)
        then(server, client)

    return meddling


def cut(server: socket.socket, client: socket.socket) -> None:
    """Both sides see the end."""


def reset(server: socket.socket, client: socket.socket) -> None:
    """Both sides are told that the other one knows of no connection."""
    for one in (server, client):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")


def silence(server: socket.socket, client: socket.socket) -> None:
    """Everything is taken, and nothing passes on, nor does the end: half of the way is gone."""
    while server.recv(1 << 16):
        pass
    threading.Event().wait(30)


def trickle(server: socket.socket, client: socket.socket) -> None:
    """One byte a hundredth of a second: far less than chunks would be."""
    while piece := server.recv(1):
        client.sendall(piece)
        time.sleep(0.01)


def flipped(server: socket.socket, client: socket.socket) -> None:
    """One bit of the next byte is another one."""
    byte = server.recv(1)
    client.sendall(bytes([byte[0] ^ 0x10]))
    passing(server, client)


def answering(text: bytes) -> Meddling:
    """Another program listens there."""

    def meddling(server: socket.socket, client: socket.socket) -> None:
        client.recv(1)
        client.sendall(text)
        threading.Event().wait(0.2)

    return meddling
