"""Certificates and keys, checked when they are read."""

from pathlib import Path

import pytest
import trustme
from builders.authority import Authority, write

from dataserver.security import SecurityError, certificates_in, load_authorities, load_pair


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki"))


@pytest.mark.parametrize("role", [{}, {"for_client": True}, {"for_server": False, "for_client": True}])
def test_a_pair(authority: Authority, role: dict[str, bool]) -> None:
    certificate, key = authority.issue("good", "localhost")
    found = load_pair(certificate, key, **role)
    assert (found.chain, found.key) == (certificate.read_bytes(), key.read_bytes())
    assert found.expires > 4e9
    assert b"PRIVATE" in found.key
    assert "PRIVATE" not in repr(found)


@pytest.mark.parametrize("role", [{}, {"for_server": False, "for_client": True}])
def test_an_expired_certificate_and_the_key_of_another_one(authority: Authority, role: dict[str, bool]) -> None:
    good, other = authority.issue("one", "localhost"), authority.issue("other", "localhost")
    with pytest.raises(SecurityError, match=r"old\.pem cannot be used \(certificate has expired\): renew it"):
        load_pair(*authority.issue("old", "localhost", expired=True), **role)
    with pytest.raises(SecurityError, match="the key belongs to another certificate"):
        load_pair(good[0], other[1], **role)


def test_files_that_are_no_pair(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("files", "localhost")
    wrong = write(tmp_path / "wrong", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    for pair in ((wrong, key), (certificate, wrong), (key, key), (certificate, certificate)):
        with pytest.raises(SecurityError, match=r"cannot be used .*PEM files are required"):
            load_pair(*pair)
    with pytest.raises(SecurityError, match="cannot be read: No such file"):
        load_pair(tmp_path / "none", key)
    key.chmod(0o644)
    with pytest.raises(SecurityError, match="others may read or write the private key"):
        load_pair(certificate, key)


def test_a_chain_with_an_intermediate_authority(tmp_path: Path) -> None:
    root = trustme.CA()
    issued = root.create_child_ca().issue_cert("localhost")
    certificate = write(tmp_path / "chain.pem", b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key = write(tmp_path / "chain.key", issued.private_key_pem.bytes())
    assert len(issued.cert_chain_pems) == 2
    assert load_pair(certificate, key, for_client=True).chain.count(b"BEGIN") == 2


def test_files_of_the_same_certificates_in_another_order_and_form() -> None:
    one, other = (trustme.CA().cert_pem.bytes() for _ in range(2))
    found = certificates_in(one + other)
    assert len(found) == 2
    for same in (other + one, b"# ours\n" + other.replace(b"\n", b"\r\n") + b"\nold\n" + one, one + other + one):
        assert certificates_in(same) == found
    assert certificates_in(one) not in (found, certificates_in(other), [])


def test_authorities(authority: Authority, tmp_path: Path) -> None:
    two = write(tmp_path / "two.pem", authority.pem + trustme.CA().cert_pem.bytes())
    assert load_authorities(two) == two.read_bytes()
    for data in (b"", b"hello", bytes(range(256))):
        with pytest.raises(SecurityError, match="PEM with one or more certificates is required"):
            load_authorities(write(tmp_path / "none.pem", data))
