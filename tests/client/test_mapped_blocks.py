"""What a client does with memory that a server shares, and with a server that shares it wrongly."""

import fcntl
import math
import os
import resource
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dataserver.serving.stream_memory import BufferPool, ByteBudget
from dataserver.serving.transport.shared_memory import SharedMemoryTransport
from dataserver.serving.transport.shared_memory_listener import SharedMemoryListener
from trainclient.stream import shared_memory
from trainclient.stream.errors import ProtocolError
from trainclient.stream.shared_memory import MAX_BLOCKS, MappedBlocks

SIZE = 1 << 20


@pytest.fixture
def listener() -> Iterator[SharedMemoryListener]:
    found = SharedMemoryListener(wanted=True)
    yield found
    found.close()


def pair(listener: SharedMemoryListener, limit: int = 1 << 30) -> tuple[SharedMemoryTransport, MappedBlocks]:
    mapped = MappedBlocks.of(listener.name, limit, stays=True)
    assert mapped is not None
    consumer = listener.transport(mapped.token, ByteBudget(1 << 40).open(), BufferPool(ByteBudget(0)))
    assert consumer is not None
    return consumer, mapped


def share(consumer: SharedMemoryTransport, fill: int) -> int:
    block = consumer.memory(SIZE)
    assert block is not None
    block.buffer[:] = fill
    consumer.share(block)
    consumer.give(block)
    return block.number


def test_a_block_comes_back_when_its_last_view_is_dropped(listener: SharedMemoryListener) -> None:
    consumer, mapped = pair(listener)
    taken = mapped.take(share(consumer, 3), SIZE)
    view = taken[10:20].view(np.uint16)
    del taken
    assert (mapped.take(share(consumer, 5), SIZE - 1) == 5).all()
    assert share(consumer, 6) == 1
    assert (mapped.take(1, SIZE) == 6).all()
    assert (view == 0x0303).all()
    del view
    assert {share(consumer, 7), share(consumer, 8)} == {0, 1}


def test_a_client_with_nothing_to_read_gets_one_more(listener: SharedMemoryListener) -> None:
    consumer, mapped = pair(listener, SIZE)
    kept = mapped.take(share(consumer, 3), SIZE)
    following = consumer.memory(SIZE)
    assert following is not None
    assert not consumer.wants(following)
    mapped.ask()
    assert consumer.wants(following)
    assert (kept == 3).all()
    mapped.close()
    mapped.ask()  # of nobody


def test_a_client_to_which_one_is_on_its_way_does_not_keep_what_it_has(listener: SharedMemoryListener) -> None:
    consumer, mapped = pair(listener, 2 * SIZE)
    kept = mapped.take(share(consumer, 3), SIZE)
    number = share(consumer, 4)
    mapped.ask()
    following = consumer.memory(SIZE)
    assert following is not None
    assert not consumer.wants(following)
    assert (mapped.take(number, SIZE) == 4).all()  # and dropped
    assert consumer.wants(following)
    assert (kept == 3).all()


def test_what_was_returned_is_said_before_that_nothing_is_left(listener: SharedMemoryListener) -> None:
    consumer, mapped = pair(listener, 7 * SIZE)
    taken = [mapped.take(share(consumer, number), SIZE) for number in range(7)]
    mapped._said_at = math.inf
    del taken[:2]
    assert len(mapped._unsaid) == 2
    mapped.ask()
    taken += [mapped.take(share(consumer, number), SIZE) for number in range(2)]
    assert consumer.memory(SIZE) is not None, "it was taken for one that keeps as much as it wants"


def test_what_finds_no_room_is_said_later(listener: SharedMemoryListener) -> None:
    consumer, mapped = pair(listener)
    taken = mapped.take(share(consumer, 3), SIZE)
    while not mapped._unsaid:  # the server does not listen
        mapped.ask()
    del taken
    assert len(mapped._unsaid) == 2
    while mapped._unsaid:
        consumer.memory(1)
        mapped.ask()
    for _ in range(100):  # it listens to some at a time
        consumer.memory(1)
    assert {share(consumer, 4), share(consumer, 5)} == {0, 1}, "one that was returned, and another one"


def test_while_most_is_kept_returns_are_said_together(listener: SharedMemoryListener) -> None:
    consumer, mapped = pair(listener)
    taken = [mapped.take(share(consumer, number), SIZE) for number in range(7)]
    mapped._said_at = math.inf
    taken.pop()
    taken.pop()
    assert len(mapped._unsaid) == 2
    taken.pop()
    assert not mapped._unsaid
    assert {share(consumer, 7) for _ in range(3)} == {4, 5, 6}
    mapped._said_at = 0.0
    taken.pop()
    assert not mapped._unsaid, "nothing was said for long"


def test_what_is_dropped_while_something_is_said_is_said_as_well(
    listener: SharedMemoryListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage may be collected at any call, also in the thread that is saying something."""
    consumer, mapped = pair(listener)
    kept = [mapped.take(share(consumer, 3), SIZE)]

    def monotonic() -> float:
        kept.clear()
        return time.monotonic()

    monkeypatch.setattr(shared_memory, "time", SimpleNamespace(monotonic=monotonic))
    mapped.ask()
    assert not kept
    assert share(consumer, 4) == 0


def test_what_is_shared_when_a_process_forks_stays_as_it_is(listener: SharedMemoryListener) -> None:
    consumer, mapped = pair(listener)
    taken = [mapped.take(share(consumer, 3), SIZE)]
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.read(read, 1)
        os._exit(int((taken[0] != 3).any()))
    taken.clear()
    taken = [mapped.take(share(consumer, 4), SIZE)]
    taken.clear()
    mapped.take(share(consumer, 5), SIZE)  # the second one, which went back; the first one does not
    assert share(consumer, 6) == 1
    os.write(write, b"?")
    assert os.waitpid(child, 0)[1] == 0
    os.close(read)
    os.close(write)


def test_what_was_taken_outlives_the_stream(listener: SharedMemoryListener) -> None:
    consumer, mapped = pair(listener)
    taken = mapped.take(share(consumer, 6), SIZE)
    mapped.close()
    consumer.close()
    assert (taken == 6).all()
    taken[:] = 1  # whoever has it may write to it


def test_what_a_server_said_before_it_left_is_read(listener: SharedMemoryListener) -> None:
    consumer, mapped = pair(listener)
    mapped.take(share(consumer, 1), SIZE)
    last = share(consumer, 3)
    mapped.ask()  # which the server does not read
    consumer.close()
    assert (mapped.take(last, SIZE) == 3).all()


def test_dropped_blocks_are_unmapped(listener: SharedMemoryListener) -> None:
    consumer, mapped = pair(listener)
    for size in range(1, 40):
        block = consumer.memory(size << 19)
        assert block is not None
        consumer.share(block)
        consumer.give(block)
        mapped.take(block.number, 5)
    assert len(mapped._blocks) <= 3


@pytest.mark.parametrize("name", ["", "disttrain-", "disttrain-" + "G" * 32, "/tmp/.X11-unix/X0"])
def test_other_sockets_are_not_talked_to(name: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        if name:
            other.bind(f"\0{name}")
            other.listen()
            other.setblocking(False)
        assert MappedBlocks.of(name, 1, stays=True) is None
        with pytest.raises(OSError, match=r"temporarily|Invalid"):
            other.accept()


def test_a_server_elsewhere_shares_nothing() -> None:
    assert MappedBlocks.of(f"disttrain-{secrets.token_hex(16)}", 1, stays=True) is None


@pytest.mark.parametrize("limit", [1 << 63, 1 << 70])
def test_a_client_may_want_more_than_there_is(listener: SharedMemoryListener, limit: int) -> None:
    assert MappedBlocks.of(listener.name, limit, stays=True) is not None


def test_without_descriptors_nothing_is_asked_for(listener: SharedMemoryListener) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        assert MappedBlocks.of(listener.name, 1, stays=True) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class Server:
    """A server's end of a connection, which says what it wants."""

    def __init__(self) -> None:
        name = f"disttrain-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            client = MappedBlocks.of(name, 77, stays=True)
            assert client is not None
            self.client = client
            self.connection, _ = listener.accept()
        assert self.connection.recv(99) == client.token + struct.pack("<Q", 77)

    def say(self, number: int, said: int, size: int, *, seal: bool = True, copies: int = 1) -> None:
        descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        if seal:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        socket.send_fds(self.connection, [struct.pack("<IQ", number, said)], [descriptor] * copies)
        os.close(descriptor)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"said": SIZE, "size": SIZE, "seal": False}, "may shrink"),
        ({"said": SIZE, "size": SIZE // 2}, f"has {SIZE // 2} bytes"),
        ({"said": 1 << 60, "size": 1 << 60}, "cannot be mapped"),
        ({"said": SIZE, "size": SIZE, "copies": 0}, "with 0 descriptors"),
    ],
)
def test_memory_that_is_not_as_it_should_be_is_refused(server: Server, options: dict[str, int], words: str) -> None:
    server.say(0, **options)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=words):
        server.client.take(0, 1)


def test_blocks_that_are_not_there_too_small_or_shared_already_are_refused(server: Server) -> None:
    server.say(4, SIZE, SIZE)
    with pytest.raises(ProtocolError, match=r"shared 9 bytes in block 3; this client has none such"):
        server.client.take(3, 9)
    with pytest.raises(ProtocolError, match=rf"has {SIZE} bytes$"):
        server.client.take(4, SIZE + 1)
    taken = server.client.take(4, SIZE)
    with pytest.raises(ProtocolError, match=rf"has {SIZE} bytes in use"):
        server.client.take(4, SIZE)
    del taken
    server.client.take(4, 1)


def test_words_that_mean_nothing_numbers_twice_and_too_many_blocks_are_refused(server: Server) -> None:
    for words in (b"???", struct.pack("<IQ", 0, SIZE) + b"?"):
        server.connection.send(words)
        with pytest.raises(ProtocolError, match=f"described a block in {len(words)} bytes, 12 are required"):
            server.client.take(0, 1)
    server.say(0, SIZE, SIZE)
    server.say(0, SIZE, SIZE)
    with pytest.raises(ProtocolError, match="shared block 0 with 1 descriptors beside 1 others"):
        server.client.take(0, 1)
    for number in range(1, MAX_BLOCKS):
        server.say(number, 4096, 4096)
        server.client.take(number, 1)
    server.say(MAX_BLOCKS, 4096, 4096)
    with pytest.raises(ProtocolError, match=f"at most {MAX_BLOCKS} blocks"):
        server.client.take(0, 1)


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_descriptor_is_left_behind(server: Server) -> None:
    before = _num_descriptors()
    server.say(0, SIZE, SIZE, copies=3)  # the system keeps two to itself
    server.client.take(0, 1)
    server.say(1, SIZE, SIZE)
    server.client.take(1, 1)
    for number in (0, 1):
        server.connection.send(struct.pack("<IQ", number, 0))
    with pytest.raises(ProtocolError, match="in block 1; this client has none such"):
        server.client.take(1, 1)
    assert _num_descriptors() == before
