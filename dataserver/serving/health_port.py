"""Health alone, to everybody and unencrypted: probes of Kubernetes and of load balancers bring no credentials.

A probe is one call of Check. Watch is not served: calls that last would let any stranger keep probes out.
"""

from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2

from dataserver.addresses import joined, split_address
from dataserver.serving.binding import bind_grpc
from dataserver.serving.call_admission import CallPool
from dataserver.serving.handlers import standard_handler

HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"]
NO_SERVICE: Final = health_pb2.HealthCheckRequest(service="(in a request that cannot be decoded)")
CALLS: Final = 8
"""Calls in hand at once; a probe takes a millisecond."""
CONNECTIONS: Final = 64
MAX_REQUEST_BYTES: Final = 4096

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_allowed_incoming_connections", CONNECTIONS),
)


class HealthPort:
    """A gRPC server that has the health service and nothing else."""

    def __init__(self, address: str, servicer: health.HealthServicer) -> None:
        """Bind and serve.

        Args:
            address: HOST:PORT; port 0 takes a free one.
            servicer: of the health service.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._calls = CallPool(CALLS, "probes", "probe less often")
        self._server = grpc.server(self._calls, options=_OPTIONS, maximum_concurrent_rpcs=2 * CALLS)
        self._server.add_generic_rpc_handlers((standard_handler(HEALTH, servicer, NO_SERVICE, streams=None),))
        host, port = split_address(address, "health_listen")
        bound = bind_grpc(self._server, (host, port), "--health-listen", what=" for health")
        self.address = joined(host, bound)
        """HOST:PORT with the port that was taken."""
        self._server.start()

    def close(self) -> None:
        """Stop answering checks of this server's health."""
        self._server.stop(0).wait(1.0)
        self._calls.shutdown(wait=False)
