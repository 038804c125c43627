"""Memory that a server shares with clients of its own machine, over real sockets."""

import os
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from disttrain.v1 import data_service_pb2 as pb
from serving.harness import TIMEOUT_S, large_job, running

from dataserver.serving.stream_memory import Account, BufferPool, ByteBudget, size_class
from dataserver.serving.transport import shared_memory, shared_memory_listener
from dataserver.serving.transport.interface import Memory
from dataserver.serving.transport.shared_memory import MAX_IDLE, MAX_SHARED, MIN_SHARED_BYTES, SharedMemoryTransport
from dataserver.serving.transport.shared_memory_listener import SharedMemoryListener

TOKEN = bytes(range(16))
SIZE = 1 << 20


@dataclass
class Client:
    """The other end of a connection, as the proto describes it."""

    connection: socket.socket
    blocks: dict[int, np.ndarray] = field(default_factory=dict)

    def read(self) -> list[tuple[int, int]]:
        """Map what has come; numbers and sizes."""
        found = []
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(self.connection, 99, 4)
            except ConnectionResetError:
                continue
            except BlockingIOError:
                return found
            if not message:
                return found
            number, size = struct.unpack("<IQ", message)
            found.append((number, size))
            assert len(descriptors) == (size > 0)
            for descriptor in descriptors:
                self.blocks[number] = np.memmap(os.fdopen(descriptor, "r+b"), np.uint8, "r+")

    def give_back(self, number: int) -> None:
        with suppress(ConnectionError):  # the stream may have ended
            self.connection.send(struct.pack("<I", number))

    def ask(self, got: int) -> None:
        """Say that nothing is left to read of so many that were shared."""
        self.connection.send(struct.pack("<II", 0xFFFFFFFF, got))


@pytest.fixture
def listener() -> Iterator[SharedMemoryListener]:
    found = SharedMemoryListener(wanted=True)
    yield found
    found.close()


def said(listener: SharedMemoryListener, message: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0{listener.name}")
    connection.send(message)
    return connection


def consumer_of(listener: SharedMemoryListener, token: bytes = TOKEN) -> SharedMemoryTransport | None:
    return listener.transport(token, ByteBudget(1 << 40).open(), BufferPool(ByteBudget(0)))


def connected(
    listener: SharedMemoryListener, limit: int = 1 << 30, account: Account | None = None
) -> tuple[SharedMemoryTransport, Client]:
    connection = said(listener, struct.pack("<16sQ", TOKEN, limit))
    consumer = listener.transport(TOKEN, account or ByteBudget(1 << 40).open(), BufferPool(ByteBudget(0)))
    assert consumer is not None
    connection.setblocking(False)
    return consumer, Client(connection)


def shared(consumer: SharedMemoryTransport, num_bytes: int = SIZE, fill: int = 1) -> Memory:
    """A block in the stream's hand; the client is told of it."""
    block = consumer.memory(num_bytes)
    assert block is not None
    block.buffer[:] = fill
    consumer.share(block)
    return block


def made(consumer: SharedMemoryTransport, num_bytes: int = SIZE, fill: int = 1) -> Memory:
    """A block that the client alone has."""
    block = shared(consumer, num_bytes, fill)
    consumer.give(block)
    return block


def test_a_client_sees_what_is_written_without_a_copy(listener: SharedMemoryListener) -> None:
    consumer, client = connected(listener)
    block = made(consumer, fill=7)
    assert client.read() == [(block.number, size_class(SIZE))]
    assert (client.blocks[block.number] == 7).all()
    block.buffer[3] = 9
    assert client.blocks[block.number][3] == 9


def test_a_returned_block_is_used_again_and_another_one_is_not(listener: SharedMemoryListener) -> None:
    consumer, client = connected(listener)
    first, second = made(consumer), made(consumer)
    consumer.give(first)  # the client looks at it
    client.give_back(second.number)
    client.give_back(second.number)  # it has returned it already
    client.give_back(12345)
    assert consumer.memory(SIZE) is second
    assert consumer.memory(SIZE) not in (first, second)


def test_a_block_is_used_again_when_neither_the_stream_nor_its_client_has_it(listener: SharedMemoryListener) -> None:
    consumer, client = connected(listener)
    early = shared(consumer)
    client.give_back(early.number)  # before the stream has put it down, as a client may that is told of it
    other = shared(consumer)
    assert other is not early
    consumer.give(early)
    assert shared(consumer) is early
    consumer.give(other)
    assert consumer.memory(SIZE) not in (early, other)
    client.give_back(other.number)
    assert consumer.memory(SIZE) is other


def test_a_stream_lets_go_of_blocks_beyond_its_share(listener: SharedMemoryListener) -> None:
    budget = ByteBudget(4 * SIZE)
    consumer, client = connected(listener, account=budget.open())
    blocks = [made(consumer) for _ in range(4)]
    other = budget.open()
    assert not other.take(SIZE)
    for block in blocks:
        client.give_back(block.number)
    assert consumer.memory(SIZE) is blocks[3]
    assert budget.used == 2 * SIZE
    assert other.take(2 * SIZE)


def test_one_block_beyond_a_streams_share_is_used_again(listener: SharedMemoryListener) -> None:
    budget = ByteBudget(4 * SIZE)
    consumer, client = connected(listener, account=budget.open())
    block = made(consumer, 3 * SIZE)
    budget.open()
    client.give_back(block.number)
    assert consumer.memory(3 * SIZE) is block


def test_blocks_are_used_for_smaller_microbatches_and_make_room_for_larger_ones(listener: SharedMemoryListener) -> None:
    budget = ByteBudget(1 << 40)
    consumer, client = connected(listener, account=budget.open())
    block = made(consumer, 2 * SIZE)
    for size in (SIZE, 2 * SIZE, 3 * SIZE // 2):
        client.give_back(block.number)
        assert made(consumer, size) is block
    client.give_back(block.number)
    small = made(consumer, SIZE // 2)  # the other one would waste half, and stays for larger ones
    assert budget.used == 2 * SIZE + size_class(SIZE // 2 * 5 // 4)  # with some room for larger ones
    assert made(consumer, 2 * SIZE) is block
    client.read()
    for returned, size in ((small, 2 * SIZE + 1), (block, 2 * SIZE + 2)):  # they would not hold it
        client.give_back(returned.number)
        other = made(consumer, size)
        assert client.read() == [(returned.number, 0), (other.number, size_class(size))]
    assert budget.used == 2 * size_class(2 * SIZE + 1)


def test_a_large_block_makes_room_for_a_small_one_where_there_is_none_beside_it(listener: SharedMemoryListener) -> None:
    budget = ByteBudget(3 * SIZE)
    consumer, client = connected(listener, account=budget.open())
    client.give_back(made(consumer, 3 * SIZE).number)
    assert consumer.memory(SIZE) is not None
    assert budget.used == SIZE


def test_few_blocks_wait_to_be_used_again(listener: SharedMemoryListener) -> None:
    consumer, client = connected(listener)
    blocks = [made(consumer) for _ in range(MAX_IDLE + 2)]
    assert len(client.read()) == len(blocks)
    for block in blocks:
        client.give_back(block.number)
    assert consumer.memory(SIZE) is blocks[-1]
    assert client.read() == [(block.number, 0) for block in blocks[:2]]


def test_blocks_are_on_the_streams_account(listener: SharedMemoryListener) -> None:
    budget = ByteBudget(3 * SIZE)
    consumer, client = connected(listener, account=budget.open())
    blocks = [made(consumer) for _ in range(3)]
    assert budget.used == 3 * SIZE
    assert consumer.memory(SIZE) is None
    client.give_back(blocks[0].number)
    assert consumer.memory(SIZE) is blocks[0]
    consumer.give(blocks[0])
    assert consumer.memory(2 * SIZE) is None  # nor is there room for it instead of the idle one
    assert budget.used == 2 * SIZE
    consumer.close()
    assert budget.used == 0
    consumer.close()


def test_no_client_gets_what_another_one_has_seen(listener: SharedMemoryListener) -> None:
    one, client = connected(listener)
    block = made(one)
    client.read()
    client.give_back(block.number)
    one.close()
    other, _client = connected(listener)
    fresh = made(other, fill=5)
    client.blocks[block.number][:] = 6
    assert (fresh.buffer == 5).all()


def test_what_a_client_has_stays_as_it_is_when_its_stream_ends(listener: SharedMemoryListener) -> None:
    consumer, client = connected(listener)
    block = made(consumer, fill=4)
    client.read()
    consumer.close()
    consumer.give(block)  # for the stream that was in the middle of it
    consumer.share(block)
    assert consumer.memory(SIZE) is None
    again, _client = connected(listener)
    made(again, fill=8)
    assert (client.blocks[block.number] == 4).all()


@pytest.mark.parametrize("limit", [0, SIZE - 1])
def test_no_client_gets_blocks_that_it_does_not_want(listener: SharedMemoryListener, limit: int) -> None:
    consumer, _client = connected(listener, limit)
    assert consumer.memory(SIZE) is None


def test_a_client_gets_more_when_it_returns_some_or_has_nothing_to_read(listener: SharedMemoryListener) -> None:
    consumer, client = connected(listener, 2 * SIZE)
    blocks = [made(consumer) for _ in range(2)]
    following = consumer.memory(SIZE)
    assert following is not None
    assert not consumer.wants(following)
    client.give_back(blocks[0].number)
    assert consumer.wants(following)
    consumer.share(following)
    last = consumer.memory(SIZE)
    assert last is blocks[0]
    client.ask(2)  # before it got the third one
    assert not consumer.wants(last)
    client.ask(3)
    assert consumer.wants(last)
    consumer.share(last)
    assert not consumer.wants(blocks[1])
    client.connection.close()
    assert consumer.wants(blocks[1])  # nobody is waited for


def test_blocks_are_counted_and_small_ones_are_not_worth_it(listener: SharedMemoryListener) -> None:
    consumer, client = connected(listener)
    assert consumer.memory(MIN_SHARED_BYTES - 1) is None
    for _ in range(MAX_SHARED):
        assert consumer.wants(made(consumer, MIN_SHARED_BYTES)) == (len(consumer._shared) < MAX_SHARED)
    numbers = list(consumer._shared)
    assert consumer.memory(MIN_SHARED_BYTES) is not None  # ahead
    client.ask(MAX_SHARED - 1)
    again = consumer.memory(MIN_SHARED_BYTES)
    assert again is not None  # one is on its way
    client.ask(MAX_SHARED)
    assert consumer.memory(MIN_SHARED_BYTES) is None  # it keeps them
    client.give_back(numbers.pop())
    assert consumer.memory(MIN_SHARED_BYTES) is not None
    shared(consumer, MIN_SHARED_BYTES)
    assert consumer.memory(MIN_SHARED_BYTES) is None
    for number in numbers:
        client.give_back(number)
    for _ in range(MAX_SHARED):
        shared(consumer, MIN_SHARED_BYTES)
    assert consumer.memory(MIN_SHARED_BYTES) is not None  # it has returned most since


def test_the_blocks_of_all_clients_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_listener, "MAX_BLOCKS", 3)
    listener = SharedMemoryListener(wanted=True)
    one, _client = connected(listener)
    made(one)
    made(one)
    other, client = connected(listener)
    block = made(other)
    assert one.memory(SIZE) is None
    client.give_back(block.number)
    block = made(other, 4 * SIZE)  # instead of the first one
    one.close()
    made(other)
    made(other)
    assert other.memory(SIZE) is None
    listener.close()


def test_a_block_that_there_is_no_memory_for_counts_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_listener, "MAX_BLOCKS", 1)
    listener = SharedMemoryListener(wanted=True)
    poor, _client = connected(listener, account=ByteBudget(SIZE).open())
    for _ in range(3):
        assert poor.memory(2 * SIZE) is None
    assert poor.memory(SIZE) is not None
    listener.close()


def test_a_client_that_is_gone_gets_nothing(listener: SharedMemoryListener) -> None:
    consumer, client = connected(listener)
    block = made(consumer)
    consumer.give(block)
    client.connection.close()
    assert consumer.memory(SIZE) is None


def test_a_client_that_does_not_listen_gets_no_further_blocks(
    listener: SharedMemoryListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "MAX_SHARED", 10_000)
    consumer, _ = connected(listener)
    consumer._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # type: ignore[union-attr]
    blocks = 0
    while (block := consumer.memory(MIN_SHARED_BYTES)) is not None:
        consumer.share(block)
        blocks += 1
    assert 0 < blocks < shared_memory_listener.MAX_BLOCKS
    assert consumer.memory(MIN_SHARED_BYTES) is None


def test_without_descriptors_microbatches_are_sent(listener: SharedMemoryListener) -> None:
    budget = ByteBudget(1 << 40)
    consumer, _client = connected(listener, account=budget.open())
    another = said(listener, struct.pack("<16sQ", bytes(16), 9))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (another.fileno(), limits[1]))
    try:
        assert consumer.memory(SIZE) is None
        assert consumer_of(listener, bytes(16)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert budget.used == 0
    assert consumer.memory(SIZE) is not None
    assert consumer_of(listener, bytes(16)) is not None


def test_memory_cannot_shrink_under_the_server(listener: SharedMemoryListener) -> None:
    consumer, client = connected(listener)
    made(consumer)
    _, (descriptor,), _, _ = socket.recv_fds(client.connection, 99, 1)
    for size in (0, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


@pytest.mark.parametrize("message", [b"?", struct.pack("<16sQ", TOKEN, 1) + b"?"])
def test_who_says_something_else_is_sent_away(listener: SharedMemoryListener, message: bytes) -> None:
    connection = said(listener, message)
    assert consumer_of(listener) is None
    assert connection.recv(1) == b""


def test_tokens_are_taken_once_and_in_any_order(listener: SharedMemoryListener) -> None:
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent.connect(f"\0{listener.name}")
    others = [said(listener, struct.pack("<16sQ", bytes([i]) * 16, 9)) for i in range(3)]
    assert consumer_of(listener, b"") is None
    assert consumer_of(listener, b"\1" * 15) is None
    for i in (2, 0, 1):
        assert consumer_of(listener, bytes([i]) * 16) is not None
        assert consumer_of(listener, bytes([i]) * 16) is None
    silent.send(struct.pack("<16sQ", TOKEN, 9))
    assert consumer_of(listener) is not None
    assert len(others) == 3


def test_who_left_before_its_stream_began_keeps_no_descriptor(listener: SharedMemoryListener) -> None:
    said(listener, struct.pack("<16sQ", bytes(16), 9)).close()
    staying = said(listener, struct.pack("<16sQ", TOKEN, 9))
    leaving = said(listener, struct.pack("<16sQ", b"1" * 16, 9))
    assert consumer_of(listener, b"2" * 16) is None
    leaving.close()
    assert consumer_of(listener, b"2" * 16) is None
    assert len(listener._waiting) == 1
    assert consumer_of(listener) is not None
    staying.close()


def test_connections_whose_stream_is_not_asked_for_are_bounded(
    listener: SharedMemoryListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory_listener, "MAX_PENDING", 2)
    connections = []
    for i in range(3):
        connections.append(said(listener, struct.pack("<16sQ", bytes([i]) * 16, 9)))
        assert consumer_of(listener) is None
    assert connections[0].recv(1) == b""
    assert consumer_of(listener, bytes(16)) is None
    assert consumer_of(listener, b"\1" * 16) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user, too")
def test_another_user_is_sent_away(listener: SharedMemoryListener) -> None:
    program = f"""
import os, socket
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect("\\0{listener.name}")
connection.send(bytes(range(16)) + bytes(8))
print("said", flush=True)
try:
    assert connection.recv(1) == b""
except ConnectionResetError:
    pass
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert consumer_of(listener) is None
        assert process.wait(30) == 0


def test_where_nothing_is_shared_there_is_no_socket() -> None:
    listener = SharedMemoryListener(wanted=False)
    assert listener.name == ""
    assert consumer_of(listener) is None
    listener.close()


def test_a_client_that_knows_the_protos_alone(photographs: Path) -> None:
    with running({"photos": photographs}) as server:
        job = server.create(large_job(end={"steps": 6}))
        sent = server.read(job.job_id, "vit", 0)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(f"\0{server.stub.GetServerInfo(pb.GetServerInfoRequest()).memory_socket}")
        connection.send(TOKEN + struct.pack("@Q", 1 << 28))
        connection.setblocking(False)
        client, numbers = Client(connection), set()
        stream = server.stub.StreamMicrobatches(
            pb.StreamMicrobatchesRequest(job_id=job.job_id, module="vit", rank=0, memory_token=TOKEN), timeout=60
        )
        for header, body in sent.microbatches:
            found, block = next(stream).header, next(stream).shared
            assert (found.step, found.microbatch, found.crc32c) == (header.step, header.microbatch, 0)
            client.read()
            assert client.blocks[block.number][: found.total_bytes].tobytes() == bytes(body)
            client.give_back(block.number)
            numbers.add(block.number)
        assert len(numbers) < len(sent.microbatches), "what was returned is used again"
        assert next(stream).end.reason == pb.EndOfStream.REASON_END_OF_JOB


def test_a_client_that_keeps_what_it_has_does_not_hold_a_drain(photographs: Path) -> None:
    """The next microbatch is in the stream's hand, and waits for memory that never comes back."""
    with running({"photos": photographs}) as server:
        job = server.create(large_job(end={"steps": 6}))
        sizes = [header.total_bytes for header, _ in server.read(job.job_id, "vit", 0).microbatches[:2]]
        connection = said(server.server.streams.shared.shared_memory, struct.pack("<16sQ", TOKEN, max(sizes)))
        stream = server.stub.StreamMicrobatches(
            pb.StreamMicrobatchesRequest(job_id=job.job_id, module="vit", rank=0, memory_token=TOKEN), timeout=TIMEOUT_S
        )
        assert [next(stream).WhichOneof("message") for _ in range(2)] == ["header", "shared"]
        until = time.monotonic() + TIMEOUT_S
        while (one := server.server.streams.progress()[0]).sent_step is None or not one.unread_s:
            assert time.monotonic() < until
            time.sleep(0.02)
        server.server.drain(3600.0)
        assert list(stream)[-1].end.reason == pb.EndOfStream.REASON_DRAINING
        server.server.wait()
        connection.close()


@pytest.mark.parametrize("token", [b"unknown", b"?" * (1 << 20)])
def test_a_token_that_nobody_said_changes_nothing(photographs: Path, token: bytes) -> None:
    with running({"photos": photographs}) as server:
        job = server.create(large_job(end={"steps": 1}))
        request = pb.StreamMicrobatchesRequest(job_id=job.job_id, module="vit", rank=0, memory_token=token)
        messages = [message.WhichOneof("message") for message in server.stub.StreamMicrobatches(request, timeout=60)]
        assert set(messages) == {"header", "chunk", "end"}
