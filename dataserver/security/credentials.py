"""What a client shows servers and by what it knows them, and the channels that it opens so."""

import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import grpc

from dataserver.addresses import is_loopback, split_address
from dataserver.security.certificates import KeyPair, client_context, load_authorities, load_pair
from dataserver.security.files import SecurityError, Watched
from dataserver.security.tokens import bearer, load_token

Continuation = Callable[[grpc.ClientCallDetails, Any], Any]
Option = tuple[str, int | str]
_SERVER_NAME: Final = "grpc.ssl_target_name_override"
_PROBLEMS: Final = (
    ("certificate has expired", "its certificate has expired, or this machine's clock is wrong: renew the certificate"),
    ("certificate is not yet valid", "its certificate is not valid yet: check the clocks of both machines"),
    (
        "Hostname Verification",
        "its certificate does not name this host: connect by a name (or address) in the certificate, or issue one with "
        "this name",
    ),
    ("CERTIFICATE_VERIFY_FAILED", "no authority of --tls-ca signed its certificate: name the file of its authority"),
    (
        "WRONG_VERSION_NUMBER",
        "it does not speak TLS: start it with --tls-cert and --tls-key, or leave out --tls-ca where the network is "
        "trusted",
    ),
)
"""What gRPC's texts contain when a handshake fails, the first that fits, and what it means."""
_CLOSED: Final = "Socket closed"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client shows servers, and by what it knows them. Files are read again when they change."""

    tls_ca: Path | None = None
    """PEM file of the authorities that sign servers' certificates. With it every connection is encrypted."""
    tls_cert: Path | None = None
    """PEM file of this client's own certificate, for servers that ask for one (--client-ca)."""
    tls_key: Path | None = None
    """PEM file of the private key of --tls-cert."""
    token_file: Path | None = None
    """File with the token to show servers (their --token-file). Needs --tls-ca, except for servers on this machine."""

    @classmethod
    def of(
        cls,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        token_file: str | Path | None = None,
    ) -> Self:
        """Credentials whose files are named by paths or by texts.

        Raises:
            SecurityError: files that belong together are not all given.
        """
        return cls(*(None if file is None else Path(file) for file in (tls_ca, tls_cert, tls_key, token_file)))

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SecurityError("--tls-cert and --tls-key belong together, and one is missing; give both, or neither")
        if self.tls_cert is not None and self.tls_ca is None:
            raise SecurityError("--tls-cert is given without --tls-ca, by which this client knows its servers; add it")


NO_CREDENTIALS: Final = Credentials()


class _Tls(NamedTuple):
    authorities: bytes
    pair: KeyPair | None
    context: ssl.SSLContext
    """TLS context for connections beside gRPC."""


class Channels:
    """Opens channels with the same credentials. Thread-safe."""

    def __init__(
        self, credentials: Credentials = NO_CREDENTIALS, token: Callable[[], str | None] | None = None
    ) -> None:
        """Read the files.

        Args:
            credentials: what to show and to trust.
            token: gives the token for each call, where it does not come from a file of its own.

        Raises:
            SecurityError: a file cannot be used.
        """
        self._tls: Watched[_Tls] | None = None
        if credentials.tls_ca is not None:
            paths = [path for path in (credentials.tls_ca, credentials.tls_cert, credentials.tls_key) if path]
            self._tls = Watched(paths, lambda: _load(credentials))
        self._token = token
        if credentials.token_file is not None:
            file = credentials.token_file
            self._token = Watched([file], lambda: load_token(file)).get

    @property
    def version(self) -> int:
        """A number that grows when certificates change: channels opened before go on with the old ones."""
        return 0 if self._tls is None else self._tls.version

    @property
    def context(self) -> ssl.SSLContext | None:
        """TLS context for a connection beside gRPC, by Python's `ssl`; None without encryption."""
        return None if self._tls is None else self._tls.get().context

    def open(self, address: str, options: Sequence[Option] = (), server_name: str = "") -> grpc.Channel:
        """Open a channel to a server; nothing is connected yet.

        Args:
            address: HOST:PORT, or unix:PATH.
            options: of gRPC.
            server_name: the name in the server's certificate, where the address is another one.

        Raises:
            SecurityError: a token would travel unencrypted to another machine.
        """
        if self._tls is None:
            if self._token is not None and not _stays_here(address):
                raise SecurityError(
                    f"a token is to be shown to {address} over a connection without encryption: add --tls-ca with the "
                    "authority of its certificate, or leave the token out"
                )
            channel = grpc.insecure_channel(address, list(options))
        else:
            tls = self._tls.get()
            shown = (None, None) if tls.pair is None else (tls.pair.key, tls.pair.chain)
            named = [(_SERVER_NAME, server_name)] if server_name else []
            credentials = grpc.ssl_channel_credentials(tls.authorities, *shown)
            channel = grpc.secure_channel(address, credentials, [*options, *named])
        return channel if self._token is None else grpc.intercept_channel(channel, _ShowToken(self._token))


def _stays_here(address: str) -> bool:
    return address.startswith("unix:") or is_loopback(split_address(address, "a server")[0])


def _load(credentials: Credentials) -> _Tls:
    assert credentials.tls_ca is not None
    authorities, pair, files = load_authorities(credentials.tls_ca), None, None
    if credentials.tls_cert is not None and credentials.tls_key is not None:
        files = credentials.tls_cert, credentials.tls_key
        pair = load_pair(*files, for_server=False, for_client=True)
    return _Tls(authorities, pair, client_context(authorities, files))


def tls_problem(details: str) -> str | None:
    """What is wrong with a connection, by gRPC's text of its failure; None where that is not about TLS."""
    return next((meaning for text, meaning in _PROBLEMS if text in details), None)


def with_hint(details: str) -> str:
    """Gives a text of gRPC's that says nothing of the cause the likely one."""
    if _CLOSED not in details:
        return details
    return f"{details} (does it require TLS, --tls-ca, or a certificate that it knows, --tls-cert?)"


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: tuple[tuple[str, str | bytes], ...] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _CallDetails(_Details, grpc.ClientCallDetails):
    """Details of a call, as gRPC wants them."""


class _ShowToken(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds a token to each call.

    gRPC's own call credentials would do it in a thread of their own for each call, and lose it without a word on a
    channel that is not encrypted.
    """

    def __init__(self, token: Callable[[], str | None]) -> None:
        self._token = token

    def intercept_unary_unary(
        self, continuation: Continuation, client_call_details: grpc.ClientCallDetails, request: Any
    ) -> Any:
        """A call with the token."""
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(
        self, continuation: Continuation, client_call_details: grpc.ClientCallDetails, request: Any
    ) -> Any:
        """A call with the token."""
        return continuation(self._with_token(client_call_details), request)

    def _with_token(self, details: Any) -> grpc.ClientCallDetails:
        token = self._token()
        metadata = (*(details.metadata or ()), *(() if token is None else [bearer(token)]))
        return _CallDetails(
            details.method,
            details.timeout,
            metadata,
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )
