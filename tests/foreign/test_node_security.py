"""The JavaScript client before servers that encrypt and ask for certificates and tokens."""

from pathlib import Path

from builders.authority import TOKENS, Authority, shown, token_file
from foreign import node
from foreign.conftest import Case
from serving.harness import Running, running

from dataserver.security import Credentials


def named(server: Running) -> str:
    """Its address by the name of this machine: Node.js warns of TLS to servers that are known by a number alone."""
    return f"localhost:{server.address.rpartition(':')[2]}"


def test_certificates_and_tokens(case: Case, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    client = authority.client()
    config = {**authority.server(), "client_ca": authority.file, "token_file": token_file(tmp_path, "alice")}
    with running(case.datasets, credentials=client, **config) as server:
        own = ("--tls-cert", str(client.tls_cert), "--tls-key", str(client.tls_key))
        tls, token = ("--tls-ca", str(authority.file)), ("--token-file", str(shown(tmp_path, "alice")))
        found = node.read([named(server)], case.job, *tls, *own, *token)
        assert found.contents() == case.undisturbed.contents()

        assert "UNAUTHENTICATED" in node.refused([named(server)], case.job, *tls, *own)
        assert "UNAUTHENTICATED" in node.refused(
            [named(server)], case.job, *tls, *own, "--token-file", str(shown(tmp_path, "bob"))
        )
        said = node.refused([named(server)], case.job, "--tls-ca", str(other.file), *own, *token)
        assert "certificate" in said
        assert TOKENS["alice"] not in said
        for flags in (("--give-up-ms", "1000"), (*tls, "--give-up-ms", "1000", *token)):
            assert "no progress for 1000 ms" in node.refused([named(server)], case.job, *flags)


def test_a_token_leaves_this_machine_only_encrypted(case: Case, tmp_path: Path) -> None:
    said = node.refused(["10.0.0.1:1"], case.job, "--token-file", str(shown(tmp_path, "alice")))
    assert "over a connection without encryption" in said
    assert TOKENS["alice"] not in said


def test_the_server_knows_a_python_client_by_the_same_files(case: Case, tmp_path: Path) -> None:
    """What the JavaScript client shows and what `Credentials` shows is one form."""
    authority = Authority(tmp_path / "ours")
    files = Credentials(authority.file, token_file=shown(tmp_path, "alice"))
    config = {**authority.server(), "token_file": token_file(tmp_path, "alice")}
    with running(case.datasets, credentials=files, **config) as server:
        assert server.create().num_steps == 4
        flags = ("--tls-ca", str(files.tls_ca), "--token-file", str(files.token_file), "--steps", "1")
        assert node.read([named(server)], case.job, *flags).lines
