"""Encryption: who is let in and by whom, and certificates that are replaced under open streams."""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from builders.authority import Authority, write
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from serving.harness import FIXED_WINDOW, TIMEOUT_S, job_data, receive, running

from dataserver.addresses import split_address
from dataserver.security import Channels, Credentials, SecurityError, files, tls_problem, with_hint


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at whenever they are asked for, not once a second."""
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "theirs")


def outcome(address: str, credentials: Credentials | None = None) -> str:
    """What a client of these credentials finds: `ok`, or why it does not get in."""
    with Channels(credentials or Credentials()).open(address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        try:
            DataServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return tls_problem(error.details()) or with_hint(error.details())
    return "ok"


def test_a_client_knows_its_server(datasets: dict[str, Path], ours: Authority, theirs: Authority) -> None:
    with running(datasets, credentials=Credentials(ours.file), **ours.server()) as server:
        assert server.create().num_steps == 4
        assert outcome(server.address, Credentials(ours.file)) == "ok"
        assert "no authority of --tls-ca signed" in outcome(server.address, Credentials(theirs.file))
        assert "does it require TLS, --tls-ca" in outcome(server.address), "nothing goes unencrypted"
    with running(datasets, credentials=Credentials(ours.file), **ours.server("other", "data-0.example")) as server:
        assert "its certificate does not name this host" in outcome(server.address, Credentials(ours.file))
    with running(datasets) as server:
        assert "it does not speak TLS" in outcome(server.address, Credentials(ours.file)), "no downgrade"


def test_a_server_knows_its_clients(
    datasets: dict[str, Path], ours: Authority, theirs: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**ours.server(), "client_ca": ours.file}
    stranger = theirs.client()
    with running(datasets, credentials=ours.client(), **config) as server:
        assert server.create().num_steps == 4
        assert outcome(server.address, ours.client("host", "trainer.example")) == "ok"
        for shown in (None, stranger.tls_cert):
            other = Credentials(ours.file, shown, None if shown is None else stranger.tls_key)
            assert "or a certificate that it knows, --tls-cert?" in outcome(server.address, other)
        expired = ours.issue("expired", "spiffe://test/trainer", expired=True)
        with pytest.raises(SecurityError, match="certificate has expired"):
            outcome(server.address, Credentials(ours.file, *expired))
        monkeypatch.setattr("dataserver.security.credentials.load_pair", lambda c, k, **_: _Pair(c, k))
        assert "does it require TLS" in outcome(server.address, Credentials(ours.file, *expired))


class _Pair:
    """A certificate that nobody has checked."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.chain, self.key = certificate.read_bytes(), key.read_bytes()


def test_an_expired_certificate_is_found_at_the_start(datasets: dict[str, Path], ours: Authority) -> None:
    with pytest.raises(SecurityError, match="certificate has expired"), running(datasets, **ours.server(expired=True)):
        pass


def test_certificates_are_replaced_under_an_open_stream(
    datasets: dict[str, Path], ours: Authority, theirs: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """From one authority to another, both sides, as docs/operations.md says: trust both, replace, trust the new one."""
    trusted, config = ours.folder / "clients.pem", ours.server("rotated")
    write(trusted, ours.pem)
    job = job_data(end={"steps": 1000})
    with ExitStack() as stack:
        settings = {**config, "client_ca": trusted}
        server = stack.enter_context(running(datasets, FIXED_WINDOW, ours.client(), **settings))
        stream = server.stream(server.create(job).job_id)
        seen = len(receive(stream, 3).microbatches)

        write(trusted, ours.pem + theirs.pem)
        new = theirs.client("new")
        both = Credentials(trusted, new.tls_cert, new.tls_key)
        assert outcome(server.address, ours.client()) == outcome(server.address, both) == "ok"

        made = theirs.issue("rotated", "localhost", "127.0.0.1")
        write(config["tls_key"], made[1].read_bytes())  # between two writes the files do not fit each other
        with caplog.at_level(logging.WARNING):
            assert outcome(server.address, ours.client()) == "ok", "what was read before stays in use"
        assert "the key belongs to another certificate" in caplog.text
        write(config["tls_cert"], made[0].read_bytes())
        assert "no authority of --tls-ca" in outcome(server.address, ours.client())
        assert outcome(server.address, theirs.client()) == "ok"

        write(trusted, theirs.pem)
        old = ours.client()
        assert "a certificate that it knows" in outcome(
            server.address, Credentials(theirs.file, old.tls_cert, old.tls_key)
        )
        assert outcome(server.address, theirs.client()) == "ok"
        seen += len(receive(stream, 5).microbatches)
        assert seen == 8
        stream.cancel()


def test_an_expired_replacement_is_not_taken_over(
    datasets: dict[str, Path], ours: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    with running(datasets, credentials=Credentials(ours.file), **ours.server()) as server:
        ours.server(expired=True)
        assert outcome(server.address, Credentials(ours.file)) == "ok"
        assert "certificate has expired" in caplog.text
        ours.server()
        assert outcome(server.address, Credentials(ours.file)) == "ok"


def test_a_client_takes_new_certificates_without_ending_its_stream(datasets: dict[str, Path], ours: Authority) -> None:
    from trainclient.stream.client import ArrayClient

    credentials, config = ours.client(), {**ours.server(), "client_ca": ours.file}
    with running(datasets, credentials=credentials, **config) as server:
        with ArrayClient(server.address, job_data(end={"steps": 50}), "vit", 0, credentials=credentials) as client:
            next(client)
            (endpoint,) = client.fleet.endpoints
            channel = endpoint.channel()
            ours.client()
            assert endpoint.channel() is not channel
            rest = list(client)
        assert (rest[-1].step, rest[-1].last_of_step) == (49, True)


@pytest.fixture
def stalled() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_connections_that_say_nothing_or_nonsense_end(
    datasets: dict[str, Path], ours: Authority, stalled: ExitStack
) -> None:
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    with running(datasets, credentials=Credentials(ours.file), **ours.server()) as server:
        for said in (b"", hello, b"\x00" * 4096, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"):
            one = stalled.enter_context(socket.create_connection(split_address(server.address), TIMEOUT_S))
            one.sendall(said)
        began = time.monotonic()
        assert outcome(server.address, Credentials(ours.file)) == "ok"
        assert time.monotonic() - began < TIMEOUT_S
        assert server.create().num_steps == 4
