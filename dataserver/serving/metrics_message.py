"""The numbers of a server as a message of the admin service."""

from collections.abc import Callable, Mapping

from disttrain.v1 import admin_service_pb2 as pb
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from dataserver.dataset import BLOCKS, Dataset
from dataserver.serving.config import ServerConfig
from dataserver.serving.failures import FailureKind, Failures
from dataserver.serving.metrics import PLAN_BUCKETS_S, Metrics, Progress, by_rank, resident_bytes
from dataserver.serving.registry import JobRegistry
from dataserver.serving.stream.streams import Streams

TakeMetrics = Callable[[], pb.GetMetricsResponse]


def metrics_message(
    metrics: Metrics,
    streams: Streams,
    jobs: JobRegistry,
    config: ServerConfig,
    wanted_cores: float,
    refused_calls: int,
    certificate_expires: float | None,
) -> pb.GetMetricsResponse:
    """Return the answer of GetMetrics.

    Args:
        metrics: what was counted.
        streams: those that are open.
        jobs: those that are known.
        config: of the server.
        wanted_cores: as `CoresWanted` has them.
        refused_calls: refused by access control since the server began.
        certificate_expires: in seconds since 1970; None without TLS.
    """
    counts, open_streams, budget = metrics.counts(), streams.progress(), streams.shared.budget
    caches, store_reads = jobs.caches(), BLOCKS.counts
    evictions = {kind: cache.evictions for kind, cache in caches.items()}
    return pb.GetMetricsResponse(
        uptime=_duration(metrics.uptime_s),
        open_streams=len(open_streams),
        ready_microbatches=sum(stream.ready for stream in open_streams),
        preparing_microbatches=sum(stream.preparing for stream in open_streams),
        prepared_microbatches=counts.prepared_microbatches,
        sent_microbatches=counts.sent_microbatches,
        sent_bytes=counts.sent_bytes,
        shared_bytes=counts.shared_bytes,
        direct_bytes=counts.direct_bytes,
        direct_fallbacks=counts.direct_fallbacks,
        prefetch_used_bytes=budget.used,
        prefetch_limit_bytes=budget.total,
        waits=pb.StageWaits(**{stage.value: _duration(s) for stage, s in metrics.waited_s().items()}),
        decoded_images=counts.decoded_images,
        invalid_images=counts.invalid_images,
        storage_errors=counts.storage_errors,
        storage_retries=counts.storage_retries,
        storage_failures=counts.storage_failures,
        shard_read_bytes=counts.read_bytes,
        plan_times=[
            pb.PlanTimes(at_most=None if bound is None else _duration(bound), plans=plans)
            for bound, plans in zip((*PLAN_BUCKETS_S, None), counts.plans, strict=True)
        ],
        planning_time=_duration(counts.plan_seconds),
        plans_by_source=pb.PlanSources(**{source.value: n for source, n in counts.plans_by_source.items()}),
        known_jobs=jobs.num_jobs,
        cached=pb.CachedBytes(**{kind: cache.used for kind, cache in caches.items()}, limit=config.job_bytes),
        evicted=pb.CachedCounts(**{kind: found.evicted for kind, found in evictions.items()}),
        remade=pb.CachedCounts(**{kind: found.remade for kind, found in evictions.items()}),
        resident_bytes=resident_bytes(),
        cores=config.decode_threads,
        wanted_cores=wanted_cores,
        refused_calls=refused_calls,
        max_streams=config.max_streams,
        certificate_expiry=None if certificate_expires is None else _timestamp(certificate_expires),
        ranks=[_rank(rank) for rank in by_rank(open_streams)],
        store_reads=pb.StoreReads(
            requests=store_reads.store_requests,
            bytes=store_reads.store_bytes,
            piece_requests=store_reads.piece_requests,
            memory_bytes=store_reads.memory_bytes,
            disk_bytes=store_reads.disk_bytes,
            owner_bytes=store_reads.owner_bytes,
            owner_failures=store_reads.owner_failures,
        ),
    )


def failures_message(failures: Failures, datasets: Mapping[str, Dataset]) -> pb.ListFailuresResponse:
    """The answer of ListFailures, of these datasets."""
    kinds = {
        FailureKind.IMAGE: pb.FAILURE_KIND_IMAGE,
        FailureKind.READ: pb.FAILURE_KIND_READ,
        FailureKind.TEXT: pb.FAILURE_KIND_TEXT,
    }
    found = [
        pb.Failure(
            kind=kinds[one.kind],
            dataset=one.dataset,
            shard=one.shard,
            key=one.key,
            count=one.count,
            last=Timestamp(seconds=int(one.last), nanos=int(one.last % 1 * 1e9)),
            reason=one.reason,
        )
        for one in failures.listed(datasets)
    ]
    return pb.ListFailuresResponse(failures=found, forgotten=failures.num_forgotten)


def _rank(found: Progress) -> pb.RankProgress:
    return pb.RankProgress(
        job=found.job_id,
        module=found.module,
        rank=found.rank,
        sent_step=found.sent_step,
        step=found.step,
        ready_microbatches=found.ready,
        preparing_microbatches=found.preparing,
        unread=_duration(found.unread_s),
        waited=None if found.waited_s is None else _duration(found.waited_s),
    )


def _duration(seconds: float) -> Duration:
    found = Duration()
    found.FromNanoseconds(round(seconds * 1e9))
    return found


def _timestamp(seconds: float) -> Timestamp:
    found = Timestamp()
    found.FromNanoseconds(round(seconds * 1e9))
    return found
