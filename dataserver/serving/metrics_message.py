"""The numbers of a server as a message of the admin service."""

from collections.abc import Callable, Mapping

from disttrain.v1 import admin_service_pb2 as pb
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from dataserver.dataset import Dataset
from dataserver.serving.failures import FailureKind, Failures
from dataserver.serving.metrics import PLAN_BUCKETS_S, Progress, Snapshot, Stage, resident_bytes

TakeMetrics = Callable[[], pb.GetMetricsResponse]


def metrics_message(found: Snapshot) -> pb.GetMetricsResponse:
    """Return the answer of GetMetrics for what was counted."""
    counts = found.counts
    return pb.GetMetricsResponse(
        uptime=_duration(found.uptime_s),
        open_streams=len(found.streams),
        ready_microbatches=sum(stream.ready for stream in found.streams),
        preparing_microbatches=sum(stream.preparing for stream in found.streams),
        prepared_microbatches=counts.prepared_microbatches,
        sent_microbatches=counts.sent_microbatches,
        sent_bytes=counts.sent_bytes,
        shared_bytes=counts.shared_bytes,
        direct_bytes=counts.direct_bytes,
        direct_fallbacks=counts.direct_fallbacks,
        prefetch_used_bytes=found.prefetch_used_bytes,
        prefetch_limit_bytes=found.prefetch_limit_bytes,
        waits=pb.StageWaits(
            planning=_duration(found.waited_s[Stage.PLANNING]),
            decoding=_duration(found.waited_s[Stage.DECODING]),
            consumer=_duration(found.waited_s[Stage.CONSUMER]),
            memory=_duration(found.waited_s[Stage.MEMORY]),
            planning_queue=_duration(found.waited_s[Stage.PLANNING_QUEUE]),
        ),
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
        known_jobs=found.known_jobs,
        cached=pb.CachedBytes(**found.cached_bytes, limit=found.cached_limit_bytes),
        evicted=pb.CachedCounts(**{kind: counts.evicted for kind, counts in found.evictions.items()}),
        remade=pb.CachedCounts(**{kind: counts.remade for kind, counts in found.evictions.items()}),
        resident_bytes=resident_bytes(),
        cores=found.cores,
        wanted_cores=found.wanted_cores,
        refused_calls=found.refused_calls,
        max_streams=found.max_streams,
        certificate_expiry=None if found.certificate_expires is None else _timestamp(found.certificate_expires),
        ranks=[_rank(rank) for rank in found.ranks],
        store_reads=pb.StoreReads(
            requests=found.store_reads.store_requests,
            bytes=found.store_reads.store_bytes,
            piece_requests=found.store_reads.piece_requests,
            memory_bytes=found.store_reads.memory_bytes,
            disk_bytes=found.store_reads.disk_bytes,
            owner_bytes=found.store_reads.owner_bytes,
            owner_failures=found.store_reads.owner_failures,
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
