"""Servers that know each other by certificates and tokens share plans, and strangers among them do not."""

import logging
from pathlib import Path
from typing import Any

import pytest
from builders.authority import Authority, token_file, write
from fleet.servers import fleet, live, read_all, sources, until
from ports import free_addresses
from serving.harness import index, job_data, running
from shards import write_pairs

from dataserver.fleet.plan_source import PlanSource
from dataserver.security import Credentials, SecurityError, files
from dataserver.serving.config import ConfigError

JOB = job_data(datasets=[{"name": "d"}], end={"steps": 8})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("secured") / "d", 24, 8))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki")


@pytest.mark.parametrize("shown", ["certificates", "tokens", "both"])
def test_peers_share_plans(folder: Path, authority: Authority, tmp_path: Path, shown: str) -> None:
    config = dict(authority.server())
    credentials = Credentials(authority.file)
    if shown != "tokens":
        config["client_ca"], credentials = authority.file, authority.client()
    else:
        config["tls_ca"] = authority.file
    if shown != "certificates":
        tokens = token_file(tmp_path, "peers")
        config["token_file"] = tokens
        own = write(tmp_path / "own", tokens.read_bytes().split()[1])
        credentials = Credentials(credentials.tls_ca, credentials.tls_cert, credentials.tls_key, own)
    with fleet({"d": folder}, 2, credentials=credentials, **config) as servers:
        job_id = {server.create(JOB).job_id for server in servers}.pop()
        one, other = read_all(servers, job_id)
        assert one.blob() == other.blob()
        found = [sources(server) for server in servers]
        assert sum(counts.get(PlanSource.FETCHED, 0) for counts in found), found


def test_a_stranger_among_the_peers_is_asked_for_nothing(
    folder: Path, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = Authority(tmp_path / "theirs")
    ours, other = free_addresses(2)
    with (
        running({"d": folder}, credentials=theirs.client(), listen=other, client_ca=theirs.file, **theirs.server()),
        running(
            {"d": folder}, credentials=authority.client(), listen=ours, peers=[ours, other], client_ca=authority.file,
            **authority.server(),
        ) as server,
        caplog.at_level(logging.WARNING),
    ):  # fmt: skip
        assert server.server.peers is not None
        (peer,) = [peer for peer in server.server.peers.peers() if peer.address == other]
        until(
            lambda: server.server.peers.peers()[0].said is not None or server.server.peers.peers()[1].said is not None
        )
        assert peer.said is None
        assert live(server) == set()
        server.read(server.create(JOB).job_id, "llm", 0)
        assert not sources(server).keys() - {PlanSource.OWN}


def test_peers_take_new_certificates(folder: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)
    config = {**authority.server(), "client_ca": authority.file}
    with fleet({"d": folder}, 2, credentials=authority.client(), **config) as servers:
        assert servers[0].server.peers is not None
        before = servers[0].server.peers.peers()
        authority.server()
        until(lambda: not set(map(id, before)) & set(map(id, servers[0].server.peers.peers())))
        until(lambda: len(live(servers[0])) == 1)


def test_what_peers_need_is_said_at_the_start(folder: Path, authority: Authority, tmp_path: Path) -> None:
    def start(**config: Any) -> None:
        with running({"d": folder}, **config):
            pytest.fail("it started")

    tokens = token_file(tmp_path, "alice")
    with pytest.raises(SecurityError, match="has no token named peers"):
        start(token_file=tokens, peers=["127.0.0.1:1"])
    with pytest.raises(ConfigError, match="not who signs their certificates; add tls_ca"):
        start(peers=["127.0.0.1:1"], **authority.server())
    with pytest.raises(ConfigError, match="the peer data-1:1 would be shown a token unencrypted"):
        start(token_file=tokens, peers=["data-1:1"])
