"""One server: it binds an address, serves until it is drained, and ends."""

import secrets
import threading
from typing import TYPE_CHECKING, Final

import grpc
from disttrain.v1 import admin_service_pb2, data_service_pb2, peer_service_pb2
from disttrain.v1.admin_service_pb2 import GetMetricsResponse, ListFailuresResponse
from grpc_health.v1 import health, health_pb2

from dataserver.addresses import joined, split_address
from dataserver.dataset import BLOCKS
from dataserver.fleet.fetching import PlanFetcher
from dataserver.fleet.membership import Peers
from dataserver.fleet.peer import INSTANCE_BYTES
from dataserver.fleet.pieces import PieceFetcher
from dataserver.jobs import Catalog
from dataserver.security import PEERS_TOKEN, Channels, Credentials, SecurityError
from dataserver.serving.access import Access, Gate
from dataserver.serving.admin_service import AdminService
from dataserver.serving.binding import bind_grpc
from dataserver.serving.block_cache_config import default_window_bytes
from dataserver.serving.call_admission import Admission, CallPool
from dataserver.serving.config import ServerConfig
from dataserver.serving.data_port import listen_for_data
from dataserver.serving.data_service import DataService
from dataserver.serving.descriptors import max_connections
from dataserver.serving.diagnostics import Diagnostics
from dataserver.serving.errors import load_details
from dataserver.serving.handlers import service_handler, standard_handler
from dataserver.serving.health_port import HEALTH, NO_SERVICE, HealthPort
from dataserver.serving.limits import MAX_TRANSPORT_BYTES
from dataserver.serving.metrics import Metrics, usage_of
from dataserver.serving.metrics_message import failures_message, metrics_message
from dataserver.serving.own_socket import OwnSocket
from dataserver.serving.peer_service import PeerService
from dataserver.serving.reflection import enable_reflection
from dataserver.serving.registry import JobRegistry
from dataserver.serving.stream.streams import Streams
from dataserver.serving.tls import ServerTls
from dataserver.serving.wanted_cores import CoresWanted, Usage
from dataserver.tracing import Collector, recorder_to

if TYPE_CHECKING:
    from dataserver.serving.metrics_endpoint import MetricsEndpoint

UNARY_THREADS: Final = 32
"""Calls in hand beyond one for each stream, each with a thread of its own; one more is refused."""
WATCH_THREADS: Final = 64
"""Calls in hand of the streaming methods of health and reflection; one more is refused."""
PEER_THREADS: Final = 256
"""Calls of other servers in hand: each of a hundred may wait for a plan or two, and greet; one more is refused."""
STOP_GRACE_S: Final = 1.0
"""Time that calls other than streams get to end when the streams have ended."""

_DATA = data_service_pb2.DESCRIPTOR.services_by_name["DataService"]
_ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]
_PEER = peer_service_pb2.DESCRIPTOR.services_by_name["PeerService"]
_OPTIONS: Final = (
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),  # by default clients that ping are cut off
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),  # a trainer that vanished must not hold its stream for ever
    ("grpc.keepalive_timeout_ms", 10_000),
    # Pings that measure the bandwidth have this limit, a minute by default, and keepalive waits for them to end.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", MAX_TRANSPORT_BYTES),
    ("grpc.so_reuseport", 0),  # an address that another server has is refused
    # Clients connect again when they want something; whoever never does takes descriptors from others.
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.server_handshake_timeout_ms", 20_000),
)


class DataServer:
    """A running server. It holds nothing that cannot be computed again."""

    def __init__(self, config: ServerConfig, catalog: Catalog) -> None:
        """Make a server that does not listen yet.

        Raises:
            SecurityError: a certificate, token file or policy cannot be used.
            TracingError: nor can what sends traces.
        """
        self.config: Final = config
        self.catalog: Final = catalog
        self.tls: Final = ServerTls.of(config)
        self.access: Final = Access(config, catalog)
        self.address = ""
        """HOST:PORT with the port that was taken, once it serves."""
        self._metrics = Metrics()
        self._wanted: CoresWanted | None = None
        """From the start on: what compiles before it serves nobody."""
        self._recorder = None
        if config.otlp_endpoint is not None:
            collector = Collector.of(config.otlp_endpoint, insecure=config.insecure)
            self._recorder = recorder_to(collector, "disttrain-dataserver")
        self.streams: Final = Streams(config, self._metrics)
        instance = secrets.token_bytes(INSTANCE_BYTES)
        channels = _to_peers(config, self.access) if config.peers else None
        self.peers: Final = None if channels is None else Peers(config.peers, instance, channels)
        """The other servers of the fleet; None where the configuration names none."""
        fetch = None if self.peers is None else PlanFetcher(self.peers, self._metrics.plan_found).fetch
        if self.peers is not None and any(dataset.reads_ahead for dataset in catalog.datasets.values()):
            BLOCKS.use_owners(PieceFetcher(self.peers))
        self.jobs: Final = JobRegistry(catalog, config, self._metrics, fetch, self.peers)
        self._health = health.HealthServicer()
        self._lock = threading.Lock()
        self._drainer: threading.Thread | None = None
        self._endpoint: MetricsEndpoint | None = None
        self._health_port: HealthPort | None = None
        self._own_socket: OwnSocket | None = None
        self._ended = threading.Event()
        # Idle streams are not open, but each still has a thread until its consumer reads: see `Streams`.
        self._calls = CallPool(
            2 * config.max_streams + UNARY_THREADS, "calls", "go to another one, or raise max_streams"
        )
        self._watches = CallPool(WATCH_THREADS, "calls that watch health or ask reflection", "end one of them")
        self._peer_calls = CallPool(PEER_THREADS, "calls of other servers", "plan the step there")
        self._admission = Admission(self._calls)
        self._gate = Gate(self.access)
        windows = default_window_bytes(catalog.datasets)
        diagnostics = Diagnostics(config.cache_dir, windows, self.tls, self.access, self.peers)
        options = (*_OPTIONS, ("grpc.max_allowed_incoming_connections", max_connections()))
        self._grpc = grpc.server(self._calls, interceptors=[self._gate, self._admission], options=options)
        self._grpc.add_generic_rpc_handlers(
            (
                service_handler(_DATA, DataService(self.access, self.streams, self.jobs, config, self._recorder)),
                service_handler(_ADMIN, AdminService(self.drain, self.metrics, diagnostics, self._failures)),
                service_handler(
                    _PEER,
                    PeerService(self.access, self.jobs, instance, lambda: self.streams.draining, self._recorder),
                    self._peer_calls,
                ),
            )
        )
        self._grpc.add_generic_rpc_handlers((standard_handler(HEALTH, self._health, NO_SERVICE, self._watches),))
        enable_reflection(
            (_DATA.full_name, _ADMIN.full_name, _PEER.full_name, health.SERVICE_NAME), self._grpc, self._watches
        )

    @property
    def has_ended(self) -> bool:
        """Whether it was drained or stopped."""
        return self._ended.is_set()

    @property
    def metrics_url(self) -> str | None:
        """Where Prometheus finds the metrics; None where there are none."""
        return None if self._endpoint is None else self._endpoint.url

    @property
    def health_address(self) -> str | None:
        """HOST:PORT of the port for health alone; None where there is none."""
        return None if self._health_port is None else self._health_port.address

    @property
    def own_address(self) -> str:
        """Where this server asks itself, with `Access.own_token`; only with --web-listen, once it serves."""
        assert self._own_socket is not None
        return self._own_socket.address

    def _usage(self) -> Usage:
        return usage_of(self._metrics.uptime_s, self._metrics.waited_s())

    def metrics(self) -> GetMetricsResponse:
        """The numbers of this server as the answer of GetMetrics."""
        return metrics_message(
            self._metrics,
            self.streams,
            self.jobs,
            self.config,
            wanted_cores=0.0 if self._wanted is None else self._wanted.at(self._usage()),
            refused_calls=self.access.audit.refused,
            certificate_expires=None if self.tls is None else self.tls.expires,
        )

    def _failures(self, context: grpc.ServicerContext) -> ListFailuresResponse:
        return failures_message(self._metrics.failures, self.access.catalog(context).datasets)

    def start(self) -> str:
        """Bind and serve; HOST:PORT with the port that was taken.

        Raises:
            ConfigError: an address cannot be bound.
        """
        load_details()
        host, port = split_address(self.config.listen)
        credentials = None if self.tls is None else self.tls.credentials()
        bound = bind_grpc(self._grpc, (host, port), "--listen", credentials)
        self.address = joined(host, bound)
        if self.config.web_listen is not None:
            self._own_socket = OwnSocket(self._grpc)
        if self.config.direct:
            tls = self.tls
            context = None if tls is None else lambda: tls.context
            listen_for_data(self.streams.shared.direct, self.config, bound, context)
        if self.config.metrics_listen is not None:
            # With Prometheus' client and an HTTP server, which take twice as long to load as gRPC.
            from dataserver.serving.metrics_endpoint import MetricsEndpoint

            metrics_host, metrics_port = split_address(self.config.metrics_listen)
            self._endpoint = MetricsEndpoint(metrics_host, metrics_port, self.metrics, self.access, self.tls)
        if self.config.health_listen is not None:
            self._health_port = HealthPort(self.config.health_listen, self._health)
        for name in ("", _DATA.full_name):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._wanted = CoresWanted(self._usage())
        self._grpc.start()
        if self.peers is not None:
            self.peers.start()
        return self.address

    def drain(self, grace_s: float) -> int:
        """Begin to end: refuse new streams, let open ones finish the microbatch in hand, for at most `grace_s` seconds.

        Calling it again changes nothing. Returns the number of streams open at this call.
        """
        self._health.enter_graceful_shutdown()
        open_streams = self.streams.drain()  # from here on the open streams only become fewer
        with self._lock:  # a signal, a Drain call and `stop` may come together: one of them starts the thread
            if self._drainer is None:
                self._drainer = threading.Thread(target=self._end, args=(grace_s,), name="drain")
                self._drainer.start()
        return open_streams

    def cut(self) -> None:
        """Cut open streams off, so that a drain ends at once."""
        self.streams.cut()

    def stop(self) -> None:
        """End now, whatever is open, and wait until that is done."""
        self.drain(0.0)
        self.cut()
        self.wait()

    def wait(self) -> None:
        """Wait until the server was drained or stopped."""
        self._ended.wait()

    def _end(self, grace_s: float) -> None:
        self.streams.wait_until_idle(grace_s)
        # When a call ends, its callback closes its stream. Its thread may still be on its way out; nobody waits for it.
        # Nor for gRPC beyond twice the grace: it may wait for ever for a call that a client gave up as it was answered.
        self._grpc.stop(STOP_GRACE_S).wait(2 * STOP_GRACE_S)
        self.streams.close()
        self._calls.shutdown(wait=False)
        self._watches.shutdown(wait=False)
        self._peer_calls.shutdown(wait=False)
        if self.peers is not None:
            BLOCKS.use_owners(None)
            self.peers.close()
        self._admission.close()
        self._gate.close()
        if self._health_port is not None:
            self._health_port.close()
        if self._endpoint is not None:
            self._endpoint.close()
        if self._own_socket is not None:
            self._own_socket.close()
        self._ended.set()


def _to_peers(config: ServerConfig, access: Access) -> Channels:
    """What this server shows other servers: its certificate where they ask for one, and its token for peers.

    Raises:
        SecurityError: it needs a token, and has none.
    """
    if config.token_file is not None and access.peers_token() is None:
        raise SecurityError(
            f"peers are given, and the token file {config.token_file} has no token named {PEERS_TOKEN}, which servers "
            "show each other: add a line with it, the same for all"
        )
    token = None if config.token_file is None else access.peers_token
    if config.tls_cert is None:
        return Channels(token=token)
    pair = (config.tls_cert, config.tls_key) if config.client_ca is not None else (None, None)
    return Channels(Credentials(config.tls_ca or config.client_ca, *pair), token)
