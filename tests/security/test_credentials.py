"""What a client shows, and to whom."""

from pathlib import Path

import pytest
from builders.authority import TOKENS, Authority, shown

from dataserver.security import Channels, Credentials, SecurityError


def test_what_belongs_together(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match="--tls-cert and --tls-key belong together"):
        Credentials(tmp_path / "ca", tmp_path / "cert")
    with pytest.raises(SecurityError, match="--tls-cert is given without --tls-ca"):
        Credentials(None, tmp_path / "cert", tmp_path / "key")


@pytest.mark.parametrize("address", ["10.0.0.1:1", "data-0:1", "[fd00::1]:1", "localhost.example:1", "127.0.0.1.x:1"])
def test_a_token_leaves_this_machine_only_encrypted(address: str, tmp_path: Path) -> None:
    channels = Channels(Credentials(token_file=shown(tmp_path, "alice")))
    with pytest.raises(SecurityError, match="without encryption: add --tls-ca") as caught:
        channels.open(address)
    assert TOKENS["alice"] not in str(caught.value)
    encrypted = Channels(Credentials(Authority(tmp_path / "ca").file, token_file=shown(tmp_path, "alice")))
    encrypted.open(address).close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "127.8.8.8:1"])
def test_on_this_machine_a_token_needs_no_encryption(address: str, tmp_path: Path) -> None:
    Channels(Credentials(token_file=shown(tmp_path, "alice"))).open(address).close()


def test_files_are_checked_before_anything_is_connected(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    with pytest.raises(SecurityError, match="certificate has expired"):
        Channels(authority.client(expired=True))
    with pytest.raises(SecurityError, match="cannot be read: No such file"):
        Channels(Credentials(tls_ca=tmp_path / "none"))
    token = shown(tmp_path, "alice")
    token.chmod(0o644)
    with pytest.raises(SecurityError, match="others may read or write the token file"):
        Channels(Credentials(token_file=token))
