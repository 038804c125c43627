"""The metrics of a server for Prometheus: their names, which contain their units, and their help."""

from collections.abc import Iterable, Iterator

from disttrain.v1.admin_service_pb2 import GetMetricsResponse, RankProgress
from google.protobuf.duration_pb2 import Duration
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dataserver.fleet.plan_source import PlanSource
from dataserver.serving.metrics import PLAN_BUCKETS_S, Stage, cumulative
from dataserver.serving.metrics_message import TakeMetrics

CACHED = ("jobs", "tables", "windows", "plans")
"""Kinds of what is cached of jobs."""


class ServerCollector(Collector):
    """Turns the answer of GetMetrics into metric families whenever it is asked."""

    def __init__(self, metrics: TakeMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """All families of the server; those of the process come from prometheus_client."""
        found = self._metrics()
        yield from _of_streams(found)
        yield from _of_images(found)
        yield from _of_jobs(found)
        yield from _of_ranks(found.ranks)


def metrics_registry(metrics: TakeMetrics) -> CollectorRegistry:
    """A registry with the metrics of one server and of its process."""
    registry = CollectorRegistry()
    registry.register(ServerCollector(metrics))
    ProcessCollector(registry=registry)
    return registry


def _of_streams(found: GetMetricsResponse) -> Iterator[Metric]:
    yield _gauge("open_streams", "Streams that are open.", found.open_streams)
    yield _gauge("max_streams", "Streams that may be open at once (--max-streams).", found.max_streams)
    queued = _labelled("queued_microbatches", "Microbatches in the queues of all streams, by state.", "state")
    queued.add_metric(["ready"], found.ready_microbatches)
    queued.add_metric(["preparing"], found.preparing_microbatches)
    yield queued
    yield _counter("prepared_microbatches", "Microbatches made.", found.prepared_microbatches)
    yield _counter("sent_microbatches", "Microbatches that consumers took whole.", found.sent_microbatches)
    yield _counter("sent_bytes", "Bytes of these, headers included.", found.sent_bytes)
    yield _counter("shared_bytes", "Those of them that went through shared memory.", found.shared_bytes)
    yield _counter("direct_bytes", "Those of them that went over data connections.", found.direct_bytes)
    about = "Streams that left their data connection for gRPC."
    yield _counter("direct_fallbacks", about, found.direct_fallbacks)
    yield _gauge("prefetch_used_bytes", "Memory in use for working ahead.", found.prefetch_used_bytes)
    yield _gauge("prefetch_limit_bytes", "Limit of it (--prefetch-bytes).", found.prefetch_limit_bytes)
    yield _gauge("cores", "Cores that the server may keep busy (--decode-threads).", found.cores)
    yield _gauge("wanted_cores", "Cores that would make all that its trainers can take.", found.wanted_cores)
    yield _counter("refused_calls", "Calls that access control refused; see the audit lines.", found.refused_calls)
    expiry = _labelled("certificate_expiry_timestamp_seconds", "When the server's certificate expires.")
    if found.HasField("certificate_expiry"):
        expiry.add_metric([], found.certificate_expiry.ToNanoseconds() / 1e9)
    yield expiry
    waited = _counter("waited_seconds", "Seconds waited, summed over streams, by what for.", labels=("stage",))
    for stage in Stage:
        waited.add_metric([stage.value], _seconds(getattr(found.waits, stage.value)))
    yield waited


def _of_images(found: GetMetricsResponse) -> Iterator[Metric]:
    images = _counter("decoded_images", "Images of prepared microbatches, by verdict.", labels=("result",))
    images.add_metric(["valid"], found.decoded_images - found.invalid_images)
    images.add_metric(["invalid"], found.invalid_images)
    yield images
    read = _counter("read_bytes", "Encoded bytes of images read, by where from.", labels=("source",))
    read.add_metric(["shards"], found.shard_read_bytes)
    yield read
    store = found.store_reads
    asked = _counter("store_requests", "Requests to object stores for bytes of shards.", labels=("for",))
    asked.add_metric(["blocks"], store.requests - store.piece_requests)
    asked.add_metric(["images"], store.piece_requests)
    yield asked
    yield _counter("store_bytes", "Bytes of shards read from object stores.", store.bytes)
    cached = _counter("block_bytes", "Bytes of images that no store was asked for, by where from.", labels=("source",))
    for source in ("memory", "disk", "owner"):
        cached.add_metric([source], getattr(store, f"{source}_bytes"))
    yield cached
    yield _counter("owner_failures", "Calls to owners of blocks that gave nothing.", store.owner_failures)
    yield _counter("storage_errors", "Failed reads; one may stand for several images.", found.storage_errors)
    yield _counter("storage_retries", "Failed reads that were tried again.", found.storage_retries)
    yield _counter("storage_failures", "Reads that failed at the last try too.", found.storage_failures)


def _of_jobs(found: GetMetricsResponse) -> Iterator[Metric]:
    ends = [*map(str, PLAN_BUCKETS_S), "+Inf"]
    yield HistogramMetricFamily(
        "disttrain_plan_seconds",
        "Seconds until a plan was made, the time of other jobs included.",
        buckets=list(zip(ends, map(float, cumulative(entry.plans for entry in found.plan_times)), strict=True)),
        sum_value=_seconds(found.planning_time),
    )
    sources = _counter("plans", "Plans that streams asked for, by where from; with --peers.", labels=("source",))
    for source in PlanSource:
        sources.add_metric([source.value], getattr(found.plans_by_source, source.value))
    yield sources
    yield _gauge("known_jobs", "Jobs that the server knows.", found.known_jobs)
    cached = _labelled("cached_job_bytes", "What is cached of jobs, as it counts against --job-bytes.", "kind")
    for kind in CACHED:
        cached.add_metric([kind], getattr(found.cached, kind))
    yield cached
    evicted = _counter("cached_job_evictions", "What was dropped of jobs for want of room.", labels=("kind",))
    about = "What was made again within ten minutes after that: --job-bytes is too small."
    remade = _counter("cached_job_remakes", about, labels=("kind",))
    for kind in CACHED:
        evicted.add_metric([kind], getattr(found.evicted, kind))
        remade.add_metric([kind], getattr(found.remade, kind))
    yield from (evicted, remade)
    yield _gauge("cached_job_limit_bytes", "Limit of what is cached of jobs (--job-bytes).", found.cached.limit)


def _of_ranks(ranks: Iterable[RankProgress]) -> Iterator[Metric]:
    """Series of a rank exist as long as one of its streams is open."""
    labels = ("job_id", "module", "rank")
    step = _labelled("rank_step", "Step of the microbatch that the trainer took last.", *labels)
    ahead = _labelled("rank_ready_microbatches", "Microbatches that wait for the rank.", *labels)
    unread = _labelled("rank_unread_seconds", "Seconds for which the rank has not taken what is offered.", *labels)
    waited = _counter("rank_waited_seconds", "Seconds that the trainer waited for microbatches.", labels=labels)
    for rank in ranks:
        values = [rank.job, rank.module, str(rank.rank)]
        if rank.HasField("step"):
            step.add_metric(values, rank.step)
        ahead.add_metric(values, rank.ready_microbatches)
        unread.add_metric(values, _seconds(rank.unread))
        if rank.HasField("waited"):
            waited.add_metric(values, _seconds(rank.waited))
    yield from (step, ahead, unread, waited)


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9


def _gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"disttrain_{name}", about, value)


def _labelled(name: str, about: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"disttrain_{name}", about, labels=labels)


def _counter(
    name: str, about: str, value: float | None = None, labels: tuple[str, ...] | None = None
) -> CounterMetricFamily:
    return CounterMetricFamily(f"disttrain_{name}", about, value, labels)
