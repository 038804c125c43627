"""The metrics of a server for Prometheus: their names, units and help, and the HTTP endpoint that answers with them.

The endpoint answers GET /metrics and nothing else. What is sent to it costs at most a few threads, for a few seconds.
"""

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dataserver.serving.config import ConfigError, joined
from dataserver.serving.metrics import PLAN_BUCKETS_S, Progress, Snapshot, cumulative

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PATH: Final = "/metrics"
MAX_CONNECTIONS: Final = 16
"""At once; one more is closed."""
CONNECTION_S: Final = 5.0
"""After which a connection is closed, whatever it is doing."""
_POLL_S: Final = 0.5

_log = logging.getLogger(__name__)

TakeSnapshot = Callable[[], Snapshot]


class ServerCollector(Collector):
    """Turns a snapshot into metric families whenever it is asked."""

    def __init__(self, snapshot: TakeSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """All families of the server; those of the process come from prometheus_client."""
        found = self._snapshot()
        yield from _of_streams(found)
        yield from _of_images(found)
        yield from _of_jobs(found)
        yield from _of_ranks(found.ranks)


def metrics_registry(snapshot: TakeSnapshot) -> CollectorRegistry:
    """A registry with the metrics of one server and of its process."""
    registry = CollectorRegistry()
    registry.register(ServerCollector(snapshot))
    ProcessCollector(registry=registry)
    return registry


def _of_streams(found: Snapshot) -> Iterator[Metric]:
    yield _gauge("open_streams", "Streams that hold a place.", len(found.streams))
    queued = _labelled("queued_microbatches", "Microbatches in the queues of all streams, by state.", "state")
    queued.add_metric(["ready"], sum(stream.ready for stream in found.streams))
    queued.add_metric(["preparing"], sum(stream.preparing for stream in found.streams))
    yield queued
    yield _counter("prepared_microbatches", "Microbatches made.", found.counts.prepared_microbatches)
    yield _counter("sent_microbatches", "Microbatches that consumers took whole.", found.counts.sent_microbatches)
    yield _counter("sent_bytes", "Bytes of these, headers included.", found.counts.sent_bytes)
    yield _gauge("prefetch_used_bytes", "Memory in use for working ahead.", found.prefetch_used_bytes)
    yield _gauge("prefetch_limit_bytes", "Limit of it (--prefetch-bytes).", found.prefetch_limit_bytes)
    waited = _counter("waited_seconds", "Seconds waited, summed over streams, by what for.", labels=("stage",))
    for stage, seconds in found.waited_s.items():
        waited.add_metric([stage.value], seconds)
    yield waited


def _of_images(found: Snapshot) -> Iterator[Metric]:
    counts = found.counts
    images = _counter("decoded_images", "Images of prepared microbatches, by verdict.", labels=("result",))
    images.add_metric(["valid"], counts.decoded_images - counts.invalid_images)
    images.add_metric(["invalid"], counts.invalid_images)
    yield images
    read = _counter("read_bytes", "Encoded bytes of images read, by where from.", labels=("source",))
    read.add_metric(["shards"], counts.read_bytes)
    yield read
    yield _counter("storage_errors", "Failed reads; one may stand for several images.", counts.storage_errors)
    yield _counter("storage_retries", "Failed reads that were tried again.", counts.storage_retries)


def _of_jobs(found: Snapshot) -> Iterator[Metric]:
    ends = [*map(str, PLAN_BUCKETS_S), "+Inf"]
    yield HistogramMetricFamily(
        "disttrain_plan_seconds",
        "Seconds until a plan was made, turns of other jobs included.",
        buckets=list(zip(ends, map(float, cumulative(found.counts.plans)), strict=True)),
        sum_value=found.counts.plan_seconds,
    )
    yield _gauge("known_jobs", "Jobs that the server knows.", found.known_jobs)
    kept = _labelled("kept_job_bytes", "What is kept of jobs, as it counts against --job-bytes.", "kind")
    for kind, num_bytes in found.kept_bytes.items():
        kept.add_metric([kind], num_bytes)
    yield kept
    yield _gauge("kept_job_limit_bytes", "Limit of what is kept of jobs (--job-bytes).", found.kept_limit_bytes)


def _of_ranks(ranks: list[Progress]) -> Iterator[Metric]:
    """Series of a rank exist as long as one of its streams is open."""
    labels = ("job_id", "module", "rank")
    step = _labelled("rank_sent_step", "Step of the microbatch that the rank took last.", *labels)
    ahead = _labelled("rank_ready_microbatches", "Microbatches that wait for the rank.", *labels)
    unread = _labelled("rank_unread_seconds", "Seconds for which the rank has not taken what is offered.", *labels)
    for rank in ranks:
        values = [rank.job_id, rank.module, str(rank.rank)]
        if rank.sent_step is not None:
            step.add_metric(values, rank.sent_step)
        ahead.add_metric(values, rank.ready)
        unread.add_metric(values, rank.unread_s)
    yield from (step, ahead, unread)


def _gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"disttrain_{name}", about, value)


def _labelled(name: str, about: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"disttrain_{name}", about, labels=labels)


def _counter(
    name: str, about: str, value: float | None = None, labels: tuple[str, ...] | None = None
) -> CounterMetricFamily:
    return CounterMetricFamily(f"disttrain_{name}", about, value, labels)


class MetricsEndpoint:
    """Serves the metrics over HTTP until it is closed."""

    def __init__(self, host: str, port: int, snapshot: TakeSnapshot) -> None:
        """Bind and serve.

        Raises:
            ConfigError: the address cannot be bound.
        """
        registry = metrics_registry(snapshot)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._server = _HttpServer(family, (host, port), lambda: generate_latest(registry))
        except OSError as error:
            raise ConfigError(
                f"cannot listen for metrics on {joined(host, port)}: {error.strerror or error}; "
                "choose another address with --metrics-listen"
            ) from None
        self.address = joined(host, self._server.server_address[1])
        """HOST:PORT with the port that was taken."""
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and cut connections off."""
        self._server.shutdown()
        self._server.server_close()
        self._server.cut(0.0)


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    """Connections have a limit of their own; nobody waits for them."""

    def __init__(self, family: int, address: tuple[str, int], render: Callable[[], bytes]) -> None:
        self.address_family = family
        self.render = render
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        """Connections and when they came."""
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind; the inherited one also looks up the host's name, which can take long."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: Any, _client: Any) -> bool:
        """Whether there is room for one more connection."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                return False
            self._open[request] = monotonic()
            return True

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called a few times a second."""
        self.cut(CONNECTION_S)

    def cut(self, after_s: float) -> None:
        """End connections that are open for longer; their threads see it and close them."""
        with self._lock:
            for connection, since in self._open.items():
                if monotonic() - since >= after_s:
                    _shut(connection)

    def handle_error(self, _request: Any, _client: Any) -> None:
        """Log defects; say nothing of the network, or whoever cuts connections off could fill the log."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("metrics cannot be given")


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # its client was faster
        return


class _Handler(BaseHTTPRequestHandler):
    server: _HttpServer
    timeout = CONNECTION_S

    def do_GET(self) -> None:
        """Answer with the metrics."""
        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, explain=f"metrics are at {PATH}")
            return
        body = self.server.render()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        """Name no versions to strangers."""
        return "disttrain"

    def log_message(self, *_: Any) -> None:
        """Say nothing, as above."""
