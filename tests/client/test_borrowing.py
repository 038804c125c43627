"""What a client does with memory that a server lends, and with a server that lends it wrongly."""

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

from dataserver.serving.lending import Borrower, Lending
from dataserver.serving.memory import ByteBudget
from trainclient.stream import borrowing
from trainclient.stream.borrowing import MAX_BLOCKS, Borrowed
from trainclient.stream.errors import ProtocolError

SIZE = 1 << 20


@pytest.fixture
def desk() -> Iterator[Lending]:
    found = Lending(wanted=True)
    yield found
    found.close()


def pair(desk: Lending, limit: int = 1 << 30) -> tuple[Borrower, Borrowed]:
    borrowed = Borrowed.of(desk.name, limit, stays=True)
    assert borrowed is not None
    borrower = desk.claim(borrowed.token, ByteBudget(1 << 40).open())
    assert borrower is not None
    return borrower, borrowed


def lend(borrower: Borrower, fill: int) -> int:
    block = borrower.block(SIZE)
    assert block is not None
    block.buffer[:] = fill
    borrower.lend(block)
    borrower.give(block)
    return block.number


def test_a_block_comes_back_when_its_last_view_is_dropped(desk: Lending) -> None:
    borrower, borrowed = pair(desk)
    taken = borrowed.take(lend(borrower, 3), SIZE)
    view = taken[10:20].view(np.uint16)
    del taken
    assert (borrowed.take(lend(borrower, 5), SIZE - 1) == 5).all()
    assert lend(borrower, 6) == 1
    assert (borrowed.take(1, SIZE) == 6).all()
    assert (view == 0x0303).all()
    del view
    assert {lend(borrower, 7), lend(borrower, 8)} == {0, 1}


def test_a_client_with_nothing_to_read_is_lent_one_more(desk: Lending) -> None:
    borrower, borrowed = pair(desk, SIZE)
    kept = borrowed.take(lend(borrower, 3), SIZE)
    following = borrower.block(SIZE)
    assert following is not None
    assert not borrower.has_room(following)
    borrowed.ask()
    assert borrower.has_room(following)
    assert (kept == 3).all()
    borrowed.close()
    borrowed.ask()  # of nobody


def test_a_client_to_which_one_is_on_its_way_does_not_keep_what_it_has(desk: Lending) -> None:
    borrower, borrowed = pair(desk, 2 * SIZE)
    kept = borrowed.take(lend(borrower, 3), SIZE)
    number = lend(borrower, 4)
    borrowed.ask()
    following = borrower.block(SIZE)
    assert following is not None
    assert not borrower.has_room(following)
    assert (borrowed.take(number, SIZE) == 4).all()  # and dropped
    assert borrower.has_room(following)
    assert (kept == 3).all()


def test_what_was_returned_is_said_before_that_nothing_is_left(desk: Lending) -> None:
    borrower, borrowed = pair(desk, 7 * SIZE)
    taken = [borrowed.take(lend(borrower, number), SIZE) for number in range(7)]
    borrowed._said_at = math.inf
    del taken[:2]
    assert len(borrowed._unsaid) == 2
    borrowed.ask()
    taken += [borrowed.take(lend(borrower, number), SIZE) for number in range(2)]
    assert borrower.block(SIZE) is not None, "it was taken for one that keeps as much as it wants"


def test_what_finds_no_room_is_said_later(desk: Lending) -> None:
    borrower, borrowed = pair(desk)
    taken = borrowed.take(lend(borrower, 3), SIZE)
    while not borrowed._unsaid:  # the server does not listen
        borrowed.ask()
    del taken
    assert len(borrowed._unsaid) == 2
    while borrowed._unsaid:
        borrower.block(1)
        borrowed.ask()
    for _ in range(100):  # it listens to some at a time
        borrower.block(1)
    assert {lend(borrower, 4), lend(borrower, 5)} == {0, 1}, "one that was returned, and another one"


def test_while_most_is_kept_returns_are_said_together(desk: Lending) -> None:
    borrower, borrowed = pair(desk)
    taken = [borrowed.take(lend(borrower, number), SIZE) for number in range(7)]
    borrowed._said_at = math.inf
    taken.pop()
    taken.pop()
    assert len(borrowed._unsaid) == 2
    taken.pop()
    assert not borrowed._unsaid
    assert {lend(borrower, 7) for _ in range(3)} == {4, 5, 6}
    borrowed._said_at = 0.0
    taken.pop()
    assert not borrowed._unsaid, "nothing was said for long"


def test_what_is_dropped_while_something_is_said_is_said_as_well(
    desk: Lending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage may be collected at any call, also in the thread that is saying something."""
    borrower, borrowed = pair(desk)
    kept = [borrowed.take(lend(borrower, 3), SIZE)]

    def monotonic() -> float:
        kept.clear()
        return time.monotonic()

    monkeypatch.setattr(borrowing, "time", SimpleNamespace(monotonic=monotonic))
    borrowed.ask()
    assert not kept
    assert lend(borrower, 4) == 0


def test_what_is_lent_when_a_process_forks_stays_as_it_is(desk: Lending) -> None:
    borrower, borrowed = pair(desk)
    taken = [borrowed.take(lend(borrower, 3), SIZE)]
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.read(read, 1)
        os._exit(int((taken[0] != 3).any()))
    taken.clear()
    taken = [borrowed.take(lend(borrower, 4), SIZE)]
    taken.clear()
    borrowed.take(lend(borrower, 5), SIZE)  # the second one, which went back; the first one does not
    assert lend(borrower, 6) == 1
    os.write(write, b"?")
    assert os.waitpid(child, 0)[1] == 0
    os.close(read)
    os.close(write)


def test_what_was_taken_outlives_the_stream(desk: Lending) -> None:
    borrower, borrowed = pair(desk)
    taken = borrowed.take(lend(borrower, 6), SIZE)
    borrowed.close()
    borrower.close()
    assert (taken == 6).all()
    taken[:] = 1  # whoever has it may write to it


def test_what_a_server_said_before_it_left_is_read(desk: Lending) -> None:
    borrower, borrowed = pair(desk)
    borrowed.take(lend(borrower, 1), SIZE)
    last = lend(borrower, 3)
    borrowed.ask()  # which the server does not read
    borrower.close()
    assert (borrowed.take(last, SIZE) == 3).all()


def test_dropped_blocks_are_unmapped(desk: Lending) -> None:
    borrower, borrowed = pair(desk)
    for size in range(1, 40):
        block = borrower.block(size << 19)
        assert block is not None
        borrower.lend(block)
        borrower.give(block)
        borrowed.take(block.number, 5)
    assert len(borrowed._blocks) <= 3


@pytest.mark.parametrize("name", ["", "disttrain-", "disttrain-" + "G" * 32, "/tmp/.X11-unix/X0"])
def test_other_sockets_are_not_talked_to(name: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        if name:
            other.bind(f"\0{name}")
            other.listen()
            other.setblocking(False)
        assert Borrowed.of(name, 1, stays=True) is None
        with pytest.raises(OSError, match=r"temporarily|Invalid"):
            other.accept()


def test_a_server_elsewhere_lends_nothing() -> None:
    assert Borrowed.of(f"disttrain-{secrets.token_hex(16)}", 1, stays=True) is None


@pytest.mark.parametrize("limit", [1 << 63, 1 << 70])
def test_a_client_may_want_more_than_there_is(desk: Lending, limit: int) -> None:
    assert Borrowed.of(desk.name, limit, stays=True) is not None


def test_without_descriptors_nothing_is_asked_for(desk: Lending) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        assert Borrowed.of(desk.name, 1, stays=True) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class Server:
    """A server's end of a connection, which says what it wants."""

    def __init__(self) -> None:
        name = f"disttrain-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            client = Borrowed.of(name, 77, stays=True)
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


def test_blocks_that_are_not_there_too_small_or_lent_already_are_refused(server: Server) -> None:
    server.say(4, SIZE, SIZE)
    with pytest.raises(ProtocolError, match=r"lent 9 bytes in block 3, of which this client has none such"):
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
    with pytest.raises(ProtocolError, match="lent block 0 with 1 descriptors beside 1 others"):
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
    server.say(0, SIZE, SIZE, copies=3)  # of which the system keeps two to itself
    server.client.take(0, 1)
    server.say(1, SIZE, SIZE)
    server.client.take(1, 1)
    for number in (0, 1):
        server.connection.send(struct.pack("<IQ", number, 0))
    with pytest.raises(ProtocolError, match="in block 1, of which this client has none such"):
        server.client.take(1, 1)
    assert _num_descriptors() == before
