"""Payloads over data connections: the same bytes whatever happens to these, in memory that is used again."""

import hashlib
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client import meddler
from client.meddler import after, answering, byte_by_byte, cut, flipped, passing, reset, silence, trickle
from fleet.servers import until
from hypothesis import given, settings
from hypothesis import strategies as st
from serving.harness import TIMEOUT_S, Running, index, large_job, running
from shards import write_pairs

from dataserver.serving.stream import handing_out
from trainclient.client import DataClient
from trainclient.stream import direct
from trainclient.stream.client import ArrayClient
from trainclient.stream.direct import DirectError
from trainclient.stream.microbatch import Microbatch

STEPS = 3
FAR = "127.0.0.9"
"""An address of the server's machine that its data port does not listen on: what lies between does."""


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("photographs"), 32, 16, seed=3, median_size=400))


@pytest.fixture(scope="module")
def server(photographs: Path) -> Iterator[Running]:
    """Listens for gRPC on all addresses, and for data connections on one."""
    with running({"photos": photographs}, shared_memory=False, **listening()) as found:
        yield found


def listening() -> dict[str, Any]:
    return {"listen": "0.0.0.0:0", "insecure": True, "data_listen": "127.0.0.1:0"}


@pytest.fixture(scope="module")
def chunks(photographs: Path) -> list[str]:
    """What a server without a data port sends."""
    with running({"photos": photographs}, shared_memory=False, direct=False) as other, opened(other) as client:
        return [digest(microbatch) for microbatch in client]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing_out, "CONNECT_S", TIMEOUT_S)


def opened(server: Running, host: str = "127.0.0.1", steps: int = STEPS, **options: Any) -> ArrayClient:
    address = f"{host}:{server.address.rpartition(':')[2]}"
    return ArrayClient(address, large_job(global_batch=16, microbatch=4, end={"steps": steps}), "vit", 0, **options)


def digest(microbatch: Microbatch[Any]) -> str:
    found = hashlib.sha256(f"{microbatch.step} {microbatch.microbatch}".encode())
    for name, tensor in microbatch.tensors.items():
        found.update(name.encode() + np.asarray(tensor).tobytes())
    return found.hexdigest()


def port_of(server: Running) -> int:
    port = server.server.streams.shared.direct.port
    assert port is not None
    return port


@contextmanager
def between(server: Running, meddling: meddler.Meddling, **options: Any) -> Iterator[None]:
    with meddler.meddler(FAR, port_of(server), meddling, **options):
        yield


def fallbacks(server: Running) -> int:
    return server.server.metrics().direct_fallbacks


@pytest.mark.parametrize("meddling", [None, passing, byte_by_byte])
def test_all_payloads_come_over_the_data_connection(
    server: Running, chunks: list[str], meddling: meddler.Meddling | None
) -> None:
    before = server.server.metrics()
    way = nullcontext() if meddling is None else between(server, meddling)
    with way, opened(server, "127.0.0.1" if meddling is None else FAR) as client:
        assert [digest(microbatch) for microbatch in client] == chunks
        assert client.direct_fallbacks == 0
    until(lambda: server.server.metrics().direct_bytes - before.direct_bytes > len(chunks) << 20)
    assert fallbacks(server) == before.direct_fallbacks


def test_bytes_of_an_earlier_wait_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "SILENCE_S", -1.0)  # each wait has been too long
    watch = direct._Watch(1 << 30, lambda: False)
    watch.waited(direct.LEAST_BYTES)
    with pytest.raises(DirectError, match=r"^0 bytes came in"):
        watch.waited(0)


FRAME = 24
FAULTS: dict[str, tuple[meddler.Meddling, str]] = {
    "cut at once": (cut, "closed it while"),
    "cut in a frame": (after(FRAME - 1, cut), "closed it while"),
    "cut in a payload": (after(FRAME + 300_001, cut), "closed it while"),
    "reset": (after(FRAME + 70_000, reset), "it was cut while|closed it while"),
    "wrong step": (flipped, "and the header says"),
    "wrong microbatch": (after(8, flipped), "and the header says"),
    "wrong checksum": (after(12, flipped), "and the header says"),
    "wrong length": (after(16, flipped), "and the header says"),
    "wrong payload": (after(FRAME + 1000, flipped), "a payload came with CRC-32C"),
    "wrong later": (after(2_000_000, flipped), "CRC-32C|and the header says"),
    "silence": (after(FRAME + 1, silence), f"{FRAME + 1} bytes came in 0.5 s, while"),
    "a trickle": (after(FRAME + 1, trickle), r"(2[6-9]|[3-9]\d|\d{3}) bytes came in 0.5 s, while"),
}
SLOW = "silence", "a trickle"


@pytest.mark.parametrize("name", FAULTS)
def test_whatever_is_wrong_with_it_the_same_stream_goes_on_with_chunks(
    server: Running,
    chunks: list[str],
    name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meddling, cause = FAULTS[name]
    monkeypatch.setattr(direct, "SILENCE_S", 0.5 if name in SLOW else TIMEOUT_S)
    before = fallbacks(server)
    with between(server, meddling), opened(server, FAR) as client:
        assert [digest(microbatch) for microbatch in client] == chunks
        assert client.direct_fallbacks == 1
    if name not in SLOW:  # there the server may have written everything before
        assert fallbacks(server) == before + 1
        assert sum("over its data connection" in text for text in caplog.messages) == 1, "the server says so as well"
    (line,) = [text for text in caplog.messages if re.match(rf"server {FAR}:\d+: payloads come over gRPC", text)]
    assert re.search(cause, line), line


REFUSALS: dict[str, tuple[meddler.Meddling | None, str]] = {
    "refused": (None, "cannot be reached: Connection refused"),
    "HTTP": (answering(b"HTTP/1.1 400 Bad Request\r\n"), "answers b'HTTP'; another program"),
    "another server": (answering(b""), "closes the connection without an answer; another program or another server"),
    "no answer": (silence, "does not take the token: no answer within 0.5 s"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_data_port_that_cannot_be_used_costs_a_warning(
    server: Running,
    chunks: list[str],
    name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meddling, cause = REFUSALS[name]
    monkeypatch.setattr(direct, "CONNECT_S", 0.5)
    before = server.server.metrics()
    way = nullcontext() if meddling is None else between(server, meddling, handshake=False)
    # The server would wait for the connection for as long as the client takes to give it up.
    monkeypatch.setattr(handing_out, "CONNECT_S", 0.05)
    with way, opened(server, FAR, prefetch_bytes=0) as client:
        found = []
        for microbatch in client:
            found.append(digest(microbatch))
            until(lambda: client.direct_fallbacks or not dialling())
        assert found == chunks
        assert client.direct_fallbacks == 1
    counts = server.server.metrics()
    assert (counts.direct_fallbacks, counts.direct_bytes) == (before.direct_fallbacks + 1, before.direct_bytes)
    (line,) = [text for text in caplog.messages if text.startswith(f"server {FAR}:")]
    assert f"{FAR}:{port_of(server)} {cause}" in line


def drained(server: socket.socket, client: socket.socket) -> None:
    """Everything is taken, and then both sides see the end: what the server wrote is lost, and its stream is over."""
    while server.recv(1 << 16):
        pass


def test_a_stream_that_has_ended_is_opened_again_for_what_its_data_connection_lost(
    photographs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a data connection, which might end so again."""
    with running({"photos": photographs}, shared_memory=False, direct=False) as other, opened(other, steps=1) as client:
        expected = [digest(microbatch) for microbatch in client]
    with running({"photos": photographs}, shared_memory=False, **listening()) as server:
        with between(server, drained), opened(server, FAR, steps=1) as client:
            assert [digest(microbatch) for microbatch in client] == expected
            assert client.direct_fallbacks == 1
        before = server.server.metrics()
        assert before.direct_fallbacks == 0, "the server knew nothing of it: its stream had ended in order"
        assert before.sent_bytes > before.direct_bytes > len(expected) << 20
    (line,) = [text for text in caplog.messages if "payloads come over gRPC" in text]
    assert "the stream has ended" in line or "closed it while" in line


def test_a_client_that_gets_no_more_threads_reads_chunks(
    server: Running, chunks: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "direct":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(handing_out, "CONNECT_S", 0.05)  # the server waits all of it, since nobody comes
    with opened(server) as client:
        assert [digest(microbatch) for microbatch in client] == chunks
        assert client.direct_fallbacks == 1
    (line,) = [text for text in caplog.messages if "payloads come over gRPC" in text]
    assert "it cannot be opened: can't start new thread" in line


def dialling() -> bool:
    return any(thread.name == "direct" and thread.daemon for thread in dialling_threads())


def dialling_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "_dial" in repr(getattr(thread, "_target", None))]


def test_what_is_kept_stays_as_it_is(photographs: Path, server: Running) -> None:
    """Of a long stream each tenth microbatch is kept, or a view of it, as numpy has it or torch."""
    address, steps = server.address.replace("0.0.0.0", "127.0.0.1"), 20
    job = large_job(global_batch=16, microbatch=2, end={"steps": steps})
    retained: list[tuple[str, Any, str]] = []
    memory: set[int] = set()
    with DataClient(address, job, "vit", 0, prefetch_bytes=4 << 20) as client:
        for number, batch in enumerate(client):
            patches = batch.tensors["patches"]
            memory.add(patches.data_ptr())
            if number % 10 == 3:
                retained.append(("torch", patches, hashlib.sha256(patches.numpy()).hexdigest()))
            elif number % 10 == 7:
                row = patches.numpy()[5:9].reshape(-1)[100:900]
                retained.append(("numpy", row, hashlib.sha256(row).hexdigest()))
            del batch, patches
        assert client.direct_fallbacks == 0
    assert number + 1 == steps * 8
    assert len(memory) < number / 2, "memory is used again"
    for kind, tensor, expected in retained:
        found = hashlib.sha256(tensor.numpy() if kind == "torch" else tensor).hexdigest()
        assert found == expected, "what is kept was written over"


def test_a_client_that_is_closed_in_the_middle_ends_at_once(server: Running) -> None:
    stuck = threading.Event()

    def hold(_server: socket.socket, _client: socket.socket) -> None:
        stuck.set()
        threading.Event().wait(TIMEOUT_S)

    with between(server, after(1000, hold)):
        with opened(server, FAR) as client:
            reading = threading.Thread(target=lambda: read_until_closed(client))
            reading.start()
            assert stuck.wait(TIMEOUT_S)
        reading.join(TIMEOUT_S)
        assert not reading.is_alive()
    until(lambda: not server.server.metrics().ranks)


def read_until_closed(client: ArrayClient) -> None:
    with pytest.raises(Exception, match="closed"):
        list(client)


@settings(max_examples=20)
@given(data=st.data())
def test_frames_in_any_pieces_and_with_any_bytes(data: st.DataObject) -> None:
    """A connection whose other end is the test: what is read is what was announced, or an error."""
    payload = data.draw(st.binary(min_size=1, max_size=5000))
    cursor, crc32c = direct.Cursor(data.draw(st.integers(0, 2**53)), data.draw(st.integers(0, 2**32 - 1))), 0
    crc32c = direct.crc32c_of(payload)
    frame = direct._FRAME.pack(cursor.step, cursor.microbatch, crc32c, len(payload)) + payload
    position, bits = data.draw(st.integers(0, len(frame) - 1)), data.draw(st.integers(0, 255))
    length = data.draw(st.sampled_from([len(frame), data.draw(st.integers(0, len(frame)))]))
    changed = frame[:position] + bytes([frame[position] ^ bits]) + frame[position + 1 :]
    pieces = data.draw(st.lists(st.integers(1, 700), max_size=8))
    here, there = socket.socketpair()
    with here, there:
        for size in (*pieces, length):
            there.sendall(changed[:length][:size])
            changed, length = changed[size:], max(0, length - size)
        there.shutdown(socket.SHUT_WR)
        opened_at = object.__new__(direct.DirectConnection)
        opened_at.__dict__.update(_connection=here, _error=None, _dialling=threading.Thread())
        buffer = np.empty(len(payload), np.uint8)
        try:
            opened_at.read(cursor, crc32c, buffer, lambda: False)
        except direct.DirectError:
            assert bits or length < len(frame)
        else:
            assert buffer.tobytes() == payload
