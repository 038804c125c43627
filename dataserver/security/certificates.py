"""Certificates and keys from PEM files, checked before anything is done with them.

gRPC takes PEM texts without looking at them: an expired certificate, or the key of another one, would end handshakes
one by one with errors of the C library. Python's `ssl` checks them here, by a handshake with itself.
"""

import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Final

from dataserver.security.files import SecurityError, read_trusted

MAX_ROUNDS: Final = 16
"""Rounds of a handshake in memory, which needs three."""

_CERTIFICATE: Final = re.compile(rb"-----BEGIN ([A-Z0-9 ]*CERTIFICATE)-----(.*?)-----END \1-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate with its chain, and its private key."""

    chain: bytes
    key: bytes
    expires: float
    """When the certificate expires, in seconds since 1970."""

    def __repr__(self) -> str:
        return f"KeyPair(expires={self.expires})"  # no key in a log


def load_pair(certificate: Path, key: Path, *, for_server: bool = True, for_client: bool = False) -> KeyPair:
    """Read a certificate with its chain, and its key.

    Args:
        certificate: PEM file, the certificate itself first.
        key: PEM file of its key, without a password.
        for_server: whether a server shows it.
        for_client: whether a client does.

    Raises:
        SecurityError: a file cannot be used, the key is another one's, or the certificate has expired, is not valid
            yet, or may not be used so.
    """
    chain = read_trusted(certificate, "certificate")
    private = read_trusted(key, "private key", secret=True)
    expires = float("inf")
    for is_server in [True] * for_server + [False] * for_client:
        shows, sees = ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT
        one = ssl.SSLContext(shows if is_server else sees)
        other = ssl.SSLContext(sees if is_server else shows)
        for context in (one, other):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            _load_chain(context, certificate, key)
        expires = _handshake(one, other, chain, certificate, is_server)
    return KeyPair(chain, private, expires)


def load_authorities(path: Path) -> bytes:
    """Read the certificates of authorities.

    Raises:
        SecurityError: the file cannot be used, or all of them have expired.
    """
    found = read_trusted(path, "file of authorities")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _trust(context, found, path, "file of authorities")
    ends = [ssl.cert_time_to_seconds(str(entry["notAfter"])) for entry in context.get_ca_certs()]
    if ends and max(ends) <= time():
        raise SecurityError(f"all certificates in the file of authorities {path} have expired; renew them")
    return found


def certificates_in(pem: bytes) -> list[bytes]:
    """The DER of each certificate of a PEM text in base64, sorted: the same for files of the same certificates."""
    return sorted({b"".join(found[2].split()) for found in _CERTIFICATE.finditer(pem)})


def server_context(certificate: Path, key: Path, authorities: bytes | None) -> ssl.SSLContext:
    """The context of a server that speaks TLS by Python's `ssl`.

    Args:
        certificate: PEM file, checked before.
        key: its key.
        authorities: PEM; with them, every client has to show a certificate of theirs.

    Raises:
        SecurityError: the files have changed meanwhile, and do not fit each other.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_chain(context, certificate, key)
    if authorities is not None:
        context.load_verify_locations(cadata=authorities.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(authorities: bytes, pair: tuple[Path, Path] | None) -> ssl.SSLContext:
    """The context of a client that speaks TLS by Python's `ssl`.

    Args:
        authorities: PEM of those that sign servers' certificates.
        pair: PEM files of the client's own certificate and its key, checked before; None without one.

    Raises:
        SecurityError: the files have changed meanwhile, and do not fit each other.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=authorities.decode("ascii"))
    if pair is not None:
        _load_chain(context, *pair)
    return context


def _load_chain(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")  # else OpenSSL asks the terminal
    except (ssl.SSLError, OSError, ValueError) as error:
        problem = getattr(error, "reason", None) or str(error)
        if problem == "KEY_VALUES_MISMATCH":
            problem = "the key belongs to another certificate"
        raise SecurityError(
            f"the certificate {certificate} and the private key {key} cannot be used ({problem}): PEM files are "
            "required, the certificate before those that signed it, the key without a password"
        ) from None


def _trust(context: ssl.SSLContext, pem: bytes, path: Path, what: str) -> None:
    try:
        context.load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        problem = getattr(error, "reason", None) or "it is no PEM"
        raise SecurityError(
            f"the {what} {path} cannot be used ({problem}): PEM with one or more certificates is required"
        ) from None


def _handshake(shows: ssl.SSLContext, sees: ssl.SSLContext, chain: bytes, path: Path, is_server: bool) -> float:
    """Let one side show a certificate that the other one trusts; the time at which it expires."""
    for context in (shows, sees):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    sees.verify_mode = ssl.CERT_REQUIRED
    sees.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    _trust(sees, chain, path, "certificate")
    to_shows, to_sees = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        shows.wrap_bio(to_shows, to_sees, server_side=is_server),
        sees.wrap_bio(to_sees, to_shows, server_side=not is_server),
    )
    for _ in range(MAX_ROUNDS):
        try:
            done = [_advanced(end.do_handshake) for end in ends]
        except ssl.SSLError as error:
            problem = getattr(error, "verify_message", None) or error.reason or str(error)
            raise SecurityError(
                f"the certificate {path} cannot be used ({problem}): renew it, and check this machine's clock"
            ) from None
        if all(done):
            break
    found = ends[1].getpeercert()
    if not found:
        raise SecurityError(f"the certificate {path} cannot be used: no handshake succeeds with it; issue another one")
    return float(ssl.cert_time_to_seconds(str(found["notAfter"])))


def _advanced(step: Callable[[], object]) -> bool:
    """Whether one side of a handshake is done."""
    try:
        step()
    except ssl.SSLWantReadError:
        return False
    return True
