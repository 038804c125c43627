"""The faults themselves: each does what later tests take it to do."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import clock, disk, network
from faults.relay import Mode, Relay, relayed

TIMEOUT_S = 20


@pytest.fixture
def echo() -> Iterator[Relay]:
    """A relay to a server that sends back what it gets."""

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while piece := connection.recv(1 << 16):
                    connection.sendall(piece)
            except OSError:  # reset: the end of this connection
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed: the end of the test
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        with relayed(f"127.0.0.1:{listener.getsockname()[1]}") as relay:
            yield relay
        listener.shutdown(socket.SHUT_RDWR)


def connect(relay: Relay) -> socket.socket:
    host, port = relay.address.split(":")
    return socket.create_connection((host, int(port)), TIMEOUT_S)


def receive(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        piece = connection.recv(count - len(found))
        assert piece, "closed"
        found += piece
    return found


def silent(connection: socket.socket) -> bool:
    connection.settimeout(0.3)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(TIMEOUT_S)
    return False


def test_a_frozen_network_loses_nothing(echo: Relay) -> None:
    with connect(echo) as connection:
        connection.sendall(b"before")
        assert receive(connection, 6) == b"before"
        echo.set(Mode.FREEZE)
        connection.sendall(b"later")
        assert silent(connection)
        with connect(echo) as another:
            another.sendall(b"new")
            assert silent(another)
            echo.set(Mode.PASS)
            assert (receive(connection, 5), receive(another, 3)) == (b"later", b"new")


def test_half_a_chunk(echo: Relay) -> None:
    with connect(echo) as connection:
        echo.set(Mode.FREEZE, after_bytes=4)
        connection.sendall(b"a chunk")
        assert receive(connection, 4) == b"a ch"
        assert silent(connection)
        echo.set(Mode.PASS, delay_s=0.01)
        assert receive(connection, 3) == b"unk"


def test_what_was_dropped_never_comes(echo: Relay) -> None:
    with connect(echo) as connection:
        connection.sendall(b"before")
        assert receive(connection, 6) == b"before"
        echo.set(Mode.DROP)
        connection.sendall(b"lost")
        assert silent(connection)
        echo.set(Mode.PASS)
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_reset(echo: Relay) -> None:
    with connect(echo) as connection:
        connection.sendall(b"before")
        assert receive(connection, 6) == b"before"
        echo.set(Mode.RESET)
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
        with pytest.raises(ConnectionResetError), connect(echo) as another:
            another.recv(1)
        echo.set(Mode.PASS)
    with connect(echo) as another:
        another.sendall(b"after")
        assert receive(another, 5) == b"after"


NOW = """
import sys, time
before = time.time(), time.monotonic()
print(flush=True)
sys.stdin.readline()
print(round((time.time() - before[0]) / 1000), round((time.monotonic() - before[1]) / 1000))
"""


@pytest.mark.skipif(bool(clock.missing()), reason=clock.missing())
def test_the_wall_clock_of_a_process_jumps_and_the_monotonic_one_does_not(tmp_path: Path) -> None:
    wall = clock.WallClock(tmp_path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", NOW], env={**os.environ, **wall.environment}, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        wall.jump_to(-50_000)
        assert process.communicate("\n", TIMEOUT_S)[0] == "-50 0\n"


@pytest.mark.skipif(bool(disk.missing()), reason=disk.missing())
def test_a_full_disk(tmp_path: Path) -> None:
    with disk.small_disk(tmp_path / "disk") as folder:
        filler = disk.fill(folder)
        with pytest.raises(OSError, match="No space left"):
            (folder / "another").write_bytes(bytes(8192))
        filler.unlink()
        (folder / "another").write_bytes(bytes(8192))


@pytest.mark.skipif(bool(network.missing()), reason=network.missing())
def test_a_cut_cable_and_a_mended_one() -> None:
    with network.machine() as there:
        command = [*there.prefix, sys.executable, "-m", "http.server", "--bind", there.address, "8000"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                assert answers(there.address)
                there.cut()
                assert not answers(there.address, tries=2)
                there.join()
                assert answers(there.address)
            finally:
                server.kill()


def answers(address: str, tries: int = 20) -> bool:
    """Whether a connection to port 8000 stands, after some tries."""
    for _ in range(tries):
        try:
            socket.create_connection((address, 8000), 1).close()
        except OSError:
            threading.Event().wait(0.5)
        else:
            return True
    return False
