"""Which port data connections come to."""

import logging
import os
import ssl
from collections.abc import Callable
from typing import Final

from dataserver.addresses import joined, split_address
from dataserver.serving.binding import when_free
from dataserver.serving.config import ServerConfig
from dataserver.serving.transport.direct_listener import DirectListener

ABOVE_LISTEN: Final = 1000
"""Added to the port of gRPC, this is the data port, unless an operator names another."""

_log = logging.getLogger(__name__)


def listen_for_data(
    listener: DirectListener, config: ServerConfig, grpc_port: int, tls: Callable[[], ssl.SSLContext] | None
) -> None:
    """Have a listener listen where the configuration says.

    Args:
        listener: that of the server.
        config: of the server.
        grpc_port: the port that was taken for gRPC.
        tls: gives what a connection is encrypted with; None where gRPC is plain as well.

    Raises:
        ConfigError: the address cannot be bound.
    """
    host, stated = split_address(config.listen)
    if config.data_listen is not None:
        host, port = split_address(config.data_listen, "data_listen")
        when_free(host, port, "--data-listen", lambda: listener.listen(host, port, tls), " for data connections")
        return
    port = grpc_port + ABOVE_LISTEN if stated and grpc_port + ABOVE_LISTEN < 1 << 16 else 0
    try:
        listener.listen(host, port, tls)
    except OSError as error:
        if port == 0:
            _log.warning("payloads go over gRPC alone: no data port on %s: %s", host, os.strerror(error.errno or 0))
            return
        taken = listener.listen(host, 0, tls)
        _log.warning(
            "%s cannot be the data port (%s), so it is %d; choose one with --data-listen where a firewall must know it",
            joined(host, port), os.strerror(error.errno or 0), taken,
        )  # fmt: skip
