"""A collector of OpenTelemetry, as users name it."""

import re
from dataclasses import dataclass
from typing import Final, Self

from dataserver.addresses import is_loopback, split_address

_URL: Final = re.compile(r"(?P<scheme>https?)://(?P<address>[A-Za-z0-9._%:\[\]-]+)/?")
_MAY_BE_SECRET: Final = re.compile(r".*@|[?#].*", re.DOTALL)
_SHOWN: Final = 128
"""Characters of a URL in an error."""


class TracingError(ValueError):
    """Spans cannot be sent; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Collector:
    """Where a collector listens, and how it is reached."""

    address: str
    secure: bool
    """Whether the connection uses TLS."""

    @classmethod
    def of(cls, endpoint: str, *, insecure: bool) -> Self:
        """The collector of a URL; it is looked at here alone.

        Args:
            endpoint: http://HOST:PORT, or https://HOST:PORT with TLS.
            insecure: whether spans and tokens may go beyond this machine without encryption.

        Raises:
            TracingError: it is no URL of a collector, or what is sent to it would travel unencrypted.
        """
        match = _URL.fullmatch(endpoint)
        try:
            host, port = split_address(match["address"]) if match is not None else ("", 0)
        except ValueError:
            host, port = "", 0
        if match is None or port == 0:
            shown = _MAY_BE_SECRET.sub("...", endpoint)[:_SHOWN]
            raise TracingError(
                f"the collector of traces is {shown!r}; http://HOST:PORT, or https://HOST:PORT with TLS, is required"
            )
        found = cls(match["address"], match["scheme"] == "https")
        if not found.secure and not insecure and not is_loopback(host):
            raise TracingError(
                f"the collector of traces is {endpoint}, and traces and tokens would travel unencrypted: use https://, "
                "or a collector on this machine; or, where the network is trusted, add --insecure to dataserver serve, "
                "--otlp-insecure to trainclient train, or insecure=True to Tracing"
            )
        return found
