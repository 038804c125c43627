"""Payloads over data connections, from real servers and over real sockets."""

import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2 import EndOfStream
from fleet.servers import until
from serving.data_connection import MAGIC, connected, exactly, offered, receive_direct, said
from serving.harness import TIMEOUT_S, VIEWS, Running, large_job, reason_of, receive, rest, running

from dataserver.serving import data_port
from dataserver.serving.config import ConfigError, load_config
from dataserver.serving.stream import handing_out
from dataserver.serving.transport import direct_listener

ROOM = 16 << 20
"""More than a microbatch of `large_job`, which a stream has besides the budget."""
STEP_TOO_FAR = (grpc.StatusCode.OUT_OF_RANGE, "STEP_OUT_OF_RANGE", "GIVE_UP")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams wait for their data connections, however busy the machine is."""
    monkeypatch.setattr(handing_out, "CONNECT_S", TIMEOUT_S)


def photos(photographs: Path, **config: Any) -> Any:
    return running({"photos": photographs}, **config)


def end_direct(server: Running, offer: pb.DirectOffer, step: int, microbatch: int = 0, cause: str = "a test") -> bool:
    request = pb.EndDirectRequest(token=offer.token, step=step, microbatch=microbatch, cause=cause)
    return server.stub.EndDirect(request, timeout=TIMEOUT_S).restarted


@pytest.mark.parametrize("codec", [0, 2])
def test_payloads_are_the_same_as_chunks(server: Running, codec: int) -> None:
    job_id, codecs = server.create().job_id, [codec] * (codec > 0)
    for module, rank in VIEWS:
        chunked = server.read(job_id, module, rank, accepted_codecs=codecs)
        before = server.server.metrics().direct_bytes
        with (
            offered(server, job_id, module, rank, accepted_codecs=codecs) as (stream, offer),
            connected(offer) as connection,
        ):
            found = receive_direct(stream, connection)
            assert connection.recv(1) == b"", "it ends with the stream"
        assert (found.blob(), found.end) == (chunked.blob(), chunked.end)
        direct = server.server.metrics().direct_bytes - before
        assert direct == sum(len(body) for _, body in found.microbatches)
    assert server.server.metrics().direct_fallbacks == 0


def test_who_does_not_ask_is_offered_nothing(server: Running) -> None:
    assert next(server.stream(server.create().job_id)).WhichOneof("message") == "header"


def test_a_client_that_never_connects_gets_chunks(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing_out, "CONNECT_S", 0.01)
    job_id = server.create().job_id
    with offered(server, job_id) as (stream, _):
        assert receive(stream).blob() == server.read(job_id).blob()


@pytest.mark.parametrize(
    "hello",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: cpu1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        MAGIC + bytes(16),
        MAGIC,
        b"DTD2",
    ],
)
def test_strangers_get_nothing_and_disturb_nobody(
    server: Running, hello: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_listener, "HANDSHAKE_S", 0.2)
    job_id = server.create().job_id
    whole = server.read(job_id)
    with (
        offered(server, job_id) as (stream, offer),
        said(offer.port, hello) as stranger,
        connected(offer) as connection,
    ):
        assert exactly(stranger, 1) == b""
        assert receive_direct(stream, connection).blob() == whole.blob()


def test_a_token_is_good_once_and_a_byte_at_a_time(server: Running) -> None:
    job_id = server.create().job_id
    with offered(server, job_id) as (stream, offer):
        with socket.create_connection(("127.0.0.1", offer.port), TIMEOUT_S) as connection:
            for byte in MAGIC + offer.token:
                connection.sendall(bytes([byte]))
            assert exactly(connection, 4) == MAGIC
            with said(offer.port, MAGIC + offer.token) as second:
                assert exactly(second, 1) == b""
            assert receive_direct(stream, connection).blob() == server.read(job_id).blob()
        with said(offer.port, MAGIC + offer.token) as late:
            assert exactly(late, 1) == b""


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_silent_connections_take_few_descriptors_and_not_for_long(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three quarters of those that most systems permit a process, at least."""
    monkeypatch.setattr(direct_listener, "HANDSHAKE_S", 3.0)
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    job_id = server.create().job_id
    before = descriptors()
    with offered(server, job_id) as (stream, offer), ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (limit, most))
        count = max(700, min(most, 1024) * 3 // 4)
        silent = [stack.enter_context(said(offer.port, b"D" * (i % 2))) for i in range(count)]
        with connected(offer) as connection:
            taken = descriptors() - before - len(silent)
            assert taken <= direct_listener.MAX_PENDING + 8
            assert receive_direct(stream, connection).blob() == server.read(job_id).blob()
        for one in silent:
            assert exactly(one, 1) == b""


def test_a_late_connection_that_says_nothing_is_closed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_listener, "HANDSHAKE_S", 0.1)
    with offered(server, server.create().job_id) as (_, offer), said(offer.port, MAGIC) as silent:
        assert exactly(silent, 1) == b""


def cut(connection: socket.socket) -> None:
    connection.close()


def half_open(_: socket.socket) -> None:
    """The server sees no end: what it writes fills buffers, or seems to arrive."""


@pytest.mark.parametrize("loses", [cut, half_open])
def test_a_stream_goes_on_with_chunks_and_loses_no_byte(
    photographs: Path, loses: Callable[[socket.socket], None], caplog: pytest.LogCaptureFixture
) -> None:
    with photos(photographs) as server:
        job_id = server.create(large_job()).job_id
        whole = server.read(job_id)
        with offered(server, job_id) as (stream, offer), connected(offer) as connection:
            assert next(stream).direct
            exactly(connection, 1000)
            loses(connection)
            header = whole.microbatches[0][0]
            assert end_direct(server, offer, header.step, header.microbatch, "a\ntest")
            for message in stream:
                if message.WhichOneof("message") == "restart":
                    break
            assert (message.restart.step, message.restart.microbatch) == (header.step, header.microbatch)
            found = receive(stream)
            assert (found.blob(), found.end) == (whole.blob(), whole.end)
            assert not end_direct(server, offer, 0), "there is no such stream any more"
        assert server.server.metrics().direct_fallbacks == 1
    (line,) = [text for text in caplog.messages if "chunks over gRPC" in text]
    assert line.startswith("rank 0 of module vit of job ")
    assert line.endswith(": a\\ntest")


def test_a_client_that_could_not_connect_says_so_and_nothing_is_made_again(server: Running) -> None:
    job_id = server.create().job_id
    whole = server.read(job_id)
    made = server.server.metrics().prepared_microbatches
    with offered(server, job_id) as (stream, offer):
        assert not end_direct(server, offer, 0, cause="refused")
        assert receive(stream).blob() == whole.blob()
        with said(offer.port, MAGIC + offer.token) as late:
            assert exactly(late, 1) == b""
    counts = server.server.metrics()
    assert (counts.prepared_microbatches - made, counts.direct_fallbacks) == (len(whole.microbatches), 1)


def test_an_unknown_token_ends_nothing_and_a_step_beyond_the_job_is_refused(server: Running) -> None:
    job = server.create()
    for token in (b"", bytes(16), bytes(1000)):
        assert not end_direct(server, pb.DirectOffer(token=token), 0)
    with offered(server, job.job_id) as (_, offer):
        with pytest.raises(grpc.RpcError) as caught:
            end_direct(server, offer, job.num_steps)
        assert reason_of(caught.value)[:3] == STEP_TOO_FAR
    assert server.server.metrics().direct_fallbacks == 0


def test_a_consumer_that_reads_nothing_ends_as_idle_and_its_memory_goes_to_others(photographs: Path) -> None:
    with photos(photographs, idle_timeout_s=1, prefetch_bytes=0) as server:
        job_id = server.create(large_job()).job_id
        whole = server.read(job_id)
        with offered(server, job_id) as (stream, offer), connected(offer) as connection:
            header = next(stream).header
            assert server.server.streams.wait_until_idle(TIMEOUT_S)
            until(lambda: server.server.streams.shared.budget.used == 0)
            payload = exactly(connection, header.total_bytes + 24)
            whole_came = len(payload) == header.total_bytes + 24
            ends = [message.end for message in stream if message.WhichOneof("message") == "end"]
            at = whole.microbatches[whole_came][0]
            assert ends[0].reason == EndOfStream.REASON_IDLE
            assert (ends[0].next_step, ends[0].next_microbatch) <= (at.step, at.microbatch)


@pytest.mark.parametrize("budget", [0, 6 << 20, 24 << 20])
def test_a_consumer_that_reads_nothing_holds_its_room_and_the_budget_at_most(photographs: Path, budget: int) -> None:
    """What is being written counts as well: it lies where it was decoded."""
    with photos(photographs, prefetch_bytes=budget) as server:
        job_id = server.create(large_job(end={"steps": 20})).job_id
        with offered(server, job_id) as (stream, offer), connected(offer) as connection:
            assert next(stream).direct
            (opened,) = server.server.streams._open
            until(lambda: opened._handing_out._writing)
            rest(server)
            assert server.server.streams.shared.budget.used <= budget
            assert opened._handing_out._in_hand is not None
            waiting = opened._preparation._queue
            held = [assembly.memory.buffer.nbytes for assembly in (opened._handing_out._in_hand, *waiting)]
            assert sum(held) <= budget + ROOM
            assert (len(waiting) > 0) == (budget > 0)
            assert opened._handing_out._position == (0, 0)
            assert connection.recv(4)
        assert server.server.streams.wait_until_idle(TIMEOUT_S)
        rest(server)
        assert server.server.streams.shared.budget.used == 0


def test_a_drain_ends_behind_a_whole_payload(photographs: Path) -> None:
    with photos(photographs) as server:
        job_id = server.create(large_job(end={"steps": 8})).job_id
        with offered(server, job_id) as (stream, offer), connected(offer) as connection:
            drained: list[int] = []
            found = receive_direct(
                stream, connection, lambda _: drained or drained.append(server.server.streams.drain())
            )
            assert found.end.reason == EndOfStream.REASON_DRAINING
            last = found.microbatches[-1][0]
            following = (last.step, last.microbatch + 1)
            following = following if following[1] < last.num_microbatches else (last.step + 1, 0)
            assert (found.end.next_step, found.end.next_microbatch) == following
            assert following < (8, 0)


def test_a_server_without_a_data_port_sends_chunks(datasets: dict[str, Path]) -> None:
    with running(datasets, direct=False) as server:
        job_id = server.create().job_id
        assert server.read(job_id, direct=True).blob() == server.read(job_id).blob()


def listening(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    return socket.create_server((host, port))


def port_of(server: Running) -> int:
    port = server.server.streams.shared.direct.port
    assert port is not None
    return port


def neighbours() -> Iterator[int]:
    """Free ports whose data ports are free as well."""
    while True:
        with listening() as one:
            port = one.getsockname()[1]
            if port + data_port.ABOVE_LISTEN < 1 << 16:
                try:
                    listening(port=port + data_port.ABOVE_LISTEN).close()
                except OSError:
                    continue
        yield port


def test_the_data_port_lies_above_that_of_grpc(datasets: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    port = next(neighbours())
    with running(datasets, listen=f"127.0.0.1:{port}") as server:
        assert port_of(server) == port + 1000
    with listening(port=port + 1000), running(datasets, listen=f"127.0.0.1:{port}") as server:
        assert port_of(server) not in (port, port + 1000)
    (line,) = [text for text in caplog.messages if "data port" in text]
    assert f"127.0.0.1:{port + 1000} cannot be the data port (Address already in use), so it is" in line


def test_a_data_port_that_an_operator_names_is_had_or_refused(
    datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataserver.serving.binding.RETRY_S", 0.1)
    with listening() as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refusal = rf"^cannot listen for data connections on {address}: .*--data-listen"
        with pytest.raises(ConfigError, match=refusal), running(datasets, data_listen=address):
            pass
    with running(datasets, data_listen=address) as server:
        assert port_of(server) == int(address.rpartition(":")[2])


def test_a_data_port_that_others_reach_must_be_permitted() -> None:
    settings = {"datasets": {"d": "/data"}, "data_listen": "0.0.0.0:51051"}
    with pytest.raises(ConfigError, match=r"^data_listen is 0\.0\.0\.0:51051, which others can reach.*--insecure"):
        load_config(None, settings)
    assert load_config(None, {**settings, "insecure": True}).data_listen == "0.0.0.0:51051"


def test_payloads_of_two_streams_never_mix(photographs: Path) -> None:
    with photos(photographs) as server:
        job_id = server.create(large_job()).job_id
        whole = server.read(job_id).blob()
        with ExitStack() as stack:
            pairs = [stack.enter_context(offered(server, job_id)) for _ in range(3)]
            links = [stack.enter_context(connected(offer)) for _, offer in reversed(pairs)]
            for (stream, _), link in zip(pairs, reversed(links), strict=True):
                assert receive_direct(stream, link).blob() == whole
