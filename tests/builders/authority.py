"""Certificates of an authority of the tests' own, in files as an operator has them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from dataserver.security import Credentials

TOKENS = {name: f"{name}-{'0123456789abcdef' * 2}" for name in ("alice", "bob", "ops", "peers")}
"""By name."""


@dataclass
class Authority:
    """An authority, and a folder for what it signs."""

    folder: Path
    name: str = "ca"
    _authority: trustme.CA = field(default_factory=trustme.CA)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        write(self.file, self.pem)

    @property
    def file(self) -> Path:
        """Its own certificate."""
        return self.folder / f"{self.name}.pem"

    @property
    def pem(self) -> bytes:
        """The same."""
        return self._authority.cert_pem.bytes()

    def issue(
        self, file: str, *names: str, expired: bool = False, not_after: datetime | None = None
    ) -> tuple[Path, Path]:
        """Sign a certificate for hosts and URIs; its file and its key's, which replace those of the same name."""
        ends = {} if not_after is None else {"not_after": not_after}
        ends |= {"not_before": datetime(2020, 1, 1), "not_after": datetime(2021, 1, 1)} if expired else {}
        hosts = [name for name in names if "://" not in name]
        made = self._authority.issue_cert(*(hosts or ["localhost"]), **ends)
        chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
        if len(hosts) < len(names):
            chain = self._renamed(chain, names)
        certificate, key = self.folder / f"{file}.pem", self.folder / f"{file}.key"
        write(certificate, chain)
        write(key, made.private_key_pem.bytes())
        return certificate, key

    def _renamed(self, pem: bytes, names: Sequence[str]) -> bytes:
        """A certificate like another one, for other names: trustme signs none for URIs."""
        key = serialization.load_pem_private_key(self._authority.private_key_pem.bytes(), None)
        old = x509.load_pem_x509_certificate(pem)
        kinds = [x509.UniformResourceIdentifier(n) if "://" in n else x509.DNSName(n) for n in names]
        builder = x509.CertificateBuilder(
            old.issuer,
            old.subject,
            old.public_key(),
            old.serial_number,
            old.not_valid_before_utc,
            old.not_valid_after_utc,
        )
        for extension in old.extensions:
            value = extension.value
            if isinstance(value, x509.SubjectAlternativeName):
                value = x509.SubjectAlternativeName(kinds)
            builder = builder.add_extension(value, extension.critical)
        return builder.sign(key, old.signature_hash_algorithm).public_bytes(serialization.Encoding.PEM)

    def server(self, file: str = "server", *names: str, expired: bool = False) -> dict[str, Path]:
        """The keys of a server's configuration, for a certificate of it."""
        certificate, key = self.issue(file, *(names or ("localhost", "127.0.0.1")), expired=expired)
        return {"tls_cert": certificate, "tls_key": key}

    def client(self, file: str = "client", *names: str, expired: bool = False) -> Credentials:
        """What a client with a certificate shows."""
        certificate, key = self.issue(file, *(names or ("spiffe://test/trainer",)), expired=expired)
        return Credentials(self.file, certificate, key)


def write(file: Path, data: bytes) -> Path:
    """Replace a file by one that its owner alone may read."""
    new = file.with_name(f"{file.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
    new.replace(file)
    return file


def token_file(folder: Path, *names: str) -> Path:
    """A server's file with the tokens of these names."""
    return write(folder / "tokens", "".join(f"{name} {TOKENS[name]}\n" for name in names).encode())


def shown(folder: Path, name: str) -> Path:
    """A client's file with a token."""
    return write(folder / f"token-{name}", f"{TOKENS[name]}\n".encode())
