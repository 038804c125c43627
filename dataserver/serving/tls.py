"""The server's certificate and the authorities of its clients, taken over from their files without a restart."""

import logging
import ssl
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Final

import grpc

from dataserver.security import KeyPair, Watched, load_authorities, load_pair, server_context
from dataserver.serving.config import ServerConfig

WARN_S: Final = 7 * 86400
"""A certificate that expires sooner is worth a warning when it is read."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Loaded:
    pair: KeyPair
    client_authorities: bytes | None
    context: ssl.SSLContext
    """For what Python's `ssl` serves: the metrics, and data connections."""


class ServerTls:
    """What this server shows, and whom it lets in. Open connections go on with what they began with. Thread-safe."""

    @classmethod
    def of(cls, config: ServerConfig) -> "ServerTls | None":
        """What a configuration names; None where nothing is encrypted.

        Raises:
            SecurityError: a file cannot be used.
        """
        if config.tls_cert is None or config.tls_key is None:
            return None
        to_peers = bool(config.peers) and config.client_ca is not None
        return cls(config.tls_cert, config.tls_key, config.client_ca, to_peers=to_peers)

    def __init__(self, certificate: Path, key: Path, client_authorities: Path | None, *, to_peers: bool) -> None:
        """Read the files.

        Args:
            certificate: PEM file of what is shown.
            key: PEM file of its private key.
            client_authorities: PEM file of those who sign clients' certificates; None asks clients for none.
            to_peers: whether the certificate is shown to other servers as well, as a client's.

        Raises:
            SecurityError: a file cannot be used.
        """
        paths = [path for path in (certificate, key, client_authorities) if path is not None]
        self._files = Watched(paths, lambda: _load(certificate, key, client_authorities, to_peers=to_peers))
        self._lock = threading.Lock()
        self._given = self._files.version
        """Version of what gRPC was given last."""

    @property
    def expires(self) -> float:
        """When the certificate expires, in seconds since 1970."""
        return self._files.get().pair.expires

    @property
    def client_authorities(self) -> bytes | None:
        """PEM of those who sign clients' certificates; None where clients are asked for none."""
        return self._files.get().client_authorities

    @property
    def problem(self) -> str:
        """Why the files cannot be used as they are now; empty where they are in use."""
        return self._files.problem

    @property
    def context(self) -> ssl.SSLContext:
        """TLS context for a server that speaks TLS by Python's `ssl`."""
        return self._files.get().context

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials for a gRPC server, which asks before each handshake whether something has changed."""
        loaded = self._files.get()
        return grpc.dynamic_ssl_server_credentials(
            _configuration(loaded),
            self._changed,  # type: ignore[arg-type]  # None, which stands for no change, is missing from its types
            require_client_authentication=loaded.client_authorities is not None,
        )

    def _changed(self) -> "grpc.ServerCertificateConfiguration | None":
        with self._lock:
            version = self._files.version
            if version == self._given:
                return None
            self._given = version
        return _configuration(self._files.get())


def _load(certificate: Path, key: Path, client_authorities: Path | None, *, to_peers: bool) -> _Loaded:
    pair = load_pair(certificate, key, for_client=to_peers)
    authorities = None if client_authorities is None else load_authorities(client_authorities)
    context = server_context(certificate, key, authorities)
    left_s = pair.expires - time()
    _log.log(
        logging.WARNING if left_s < WARN_S else logging.INFO,
        "the certificate %s is valid until %s, for %.1f days",
        *(certificate, datetime.fromtimestamp(pair.expires, UTC).isoformat(), left_s / 86400),
    )
    return _Loaded(pair, authorities, context)


def _configuration(loaded: _Loaded) -> grpc.ServerCertificateConfiguration:
    pairs = [(loaded.pair.key, loaded.pair.chain)]
    return grpc.ssl_server_certificate_configuration(pairs, loaded.client_authorities)
