"""The metrics of a server for Prometheus: their names, which contain their units, and their help."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dataserver.serving.metrics import PLAN_BUCKETS_S, Progress, Snapshot, cumulative

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
