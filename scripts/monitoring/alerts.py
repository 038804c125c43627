"""The alert rules: what should wake somebody, or be looked at soon. None fires on a healthy fleet."""

from dataclasses import dataclass
from typing import Final, Literal

RUNBOOKS: Final = "https://github.com/disttrain/disttrain/blob/main/docs/operations.md"


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert rule of Prometheus."""

    name: str
    """Also the heading of its runbook."""
    severity: Literal["critical", "warning"]
    """Critical: training has stopped or is about to."""
    for_: str
    """How long it is true before it fires."""
    expr: str
    summary: str
    """One line, with the labels of the series."""

    @property
    def runbook(self) -> str:
        """Where it is said what to do."""
        return f"{RUNBOOKS}#{self.name.lower()}"


_KNOWN: Final = "last_over_time(disttrain_cores[1d])"
"""Targets that were servers within the last day, whatever the scrape job is called."""
_MADE: Final = "sum by (job, instance) (rate(disttrain_plan_seconds_count[15m]))"
"""Plans that a server makes a second."""
_FETCHED: Final = 'disttrain_plans_total{source="fetched"}'
"""Those that it has from its peers; without peers there are none of these."""
_NOT_GIVEN: Final = 'disttrain_plans_total{source=~"late|unreachable|refused|wrong"}'

TRAINERS: Final = (
    Alert(
        "DistTrainTrainersWait",
        "warning",
        "10m",
        "avg by (job_id, module) "
        "(max by (job_id, module, rank) (rate(disttrain_rank_waited_seconds_total[10m]))) > 0.1",
        "Ranks of module {{ $labels.module }} of job {{ $labels.job_id }} wait for data "
        "{{ $value | humanizePercentage }} of the time",
    ),
    Alert(
        "DistTrainRankStopped",
        "warning",
        "1m",
        "max by (job_id, module, rank) (disttrain_rank_unread_seconds) > 300",
        "Rank {{ $labels.rank }} of module {{ $labels.module }} of job {{ $labels.job_id }} has taken nothing for "
        "{{ $value | humanizeDuration }}",
    ),
    Alert(
        "DistTrainRanksDiverge",
        "critical",
        "2m",
        "(max by (job_id, module) (disttrain_rank_step) - min by (job_id, module) (disttrain_rank_step) > 8) "
        "and on (job_id, module) (min by (job_id, module) (delta(disttrain_rank_step[2m])) == 0)",
        "A rank of module {{ $labels.module }} of job {{ $labels.job_id }} stands still, {{ $value }} steps behind",
    ),
)
SERVERS: Final = (
    Alert(
        "DistTrainServerDown",
        "warning",
        "2m",
        f"up == 0 and on (job, instance) {_KNOWN}",
        "Server {{ $labels.instance }} does not answer Prometheus",
    ),
    Alert(
        "DistTrainFleetDown",
        "critical",
        "1m",
        f"count by (job) ({_KNOWN}) unless on (job) (up == 1 and on (job, instance) {_KNOWN})",
        "No server of {{ $labels.job }} answers Prometheus",
    ),
    Alert(
        "DistTrainServerRestarts",
        "warning",
        "0m",
        f"changes(process_start_time_seconds[1h]) > 2 and on (job, instance) {_KNOWN}",
        "Server {{ $labels.instance }} has restarted {{ $value }} times within an hour",
    ),
    Alert(
        "DistTrainServersTooSlow",
        "warning",
        "10m",
        'sum by (job, instance) (rate(disttrain_waited_seconds_total{stage=~"planning|decoding"}[5m])) '
        "/ sum by (job, instance) (disttrain_open_streams) > 0.2",
        "Streams of {{ $labels.instance }} wait for it {{ $value | humanizePercentage }} of the time",
    ),
    Alert(
        "DistTrainStreamsNearLimit",
        "warning",
        "5m",
        "disttrain_open_streams / disttrain_max_streams > 0.9",
        "{{ $value | humanizePercentage }} of the streams of {{ $labels.instance }} are open",
    ),
    Alert(
        "DistTrainFilesNearLimit",
        "warning",
        "5m",
        "process_open_fds / process_max_fds > 0.9 and on (job, instance) disttrain_cores",
        "{{ $labels.instance }} has {{ $value | humanizePercentage }} of its files open",
    ),
    Alert(
        "DistTrainPlansRepeated",
        "warning",
        "15m",
        f"sum by (job) (rate({_NOT_GIVEN}[15m])) / sum by (job) (rate(disttrain_plans_total[15m])) > 0.1",
        "{{ $value | humanizePercentage }} of the plans of {{ $labels.job }} are not had from their owners",
    ),
    Alert(
        "DistTrainJobBytesTooSmall",
        "warning",
        "15m",
        'sum by (job, instance) (rate(disttrain_cached_job_remakes_total{kind=~"plans|windows"}[15m])) '
        f"/ ({_MADE} + (sum by (job, instance) (rate({_FETCHED}[15m])) or 0 * {_MADE})) > 0.1",
        "{{ $labels.instance }} makes {{ $value | humanize }} plans and windows once more for each plan",
    ),
    Alert(
        "DistTrainDataConnectionsFail",
        "warning",
        "0m",
        "increase(disttrain_direct_fallbacks_total[15m]) > 0",
        "Streams of {{ $labels.instance }} left their data connections for gRPC",
    ),
)
STORAGE: Final = (
    Alert(
        "DistTrainStorageFails",
        "critical",
        "0m",
        "increase(disttrain_storage_failures_total[10m]) > 0",
        "Reads of {{ $labels.instance }} fail for good; streams end and go to other servers",
    ),
    Alert(
        "DistTrainStorageShaky",
        "warning",
        "5m",
        "sum by (job, instance) (rate(disttrain_storage_retries_total[15m])) > 0.1",
        "{{ $labels.instance }} repeats {{ $value | humanize }} reads a second",
    ),
    Alert(
        "DistTrainBadImages",
        "warning",
        "0m",
        'sum by (job) (increase(disttrain_decoded_images_total{result="invalid"}[1h])) '
        "/ sum by (job) (increase(disttrain_decoded_images_total[1h])) > 0.01",
        "{{ $value | humanizePercentage }} of the images of {{ $labels.job }} cannot be decoded",
    ),
    Alert(
        "DistTrainCachesTooSmall",
        "warning",
        "1h",
        "sum by (job) (rate(disttrain_store_bytes_total[1h])) "
        "/ sum by (job) (rate(disttrain_read_bytes_total[1h])) > 1.5",
        "{{ $labels.job }} reads {{ $value | humanize }} times the bytes of its images from stores",
    ),
)
SECURITY: Final = (
    Alert(
        "DistTrainCertificateExpires",
        "warning",
        "0m",
        "disttrain_certificate_expiry_timestamp_seconds - time() < 14 * 86400",
        "The certificate of {{ $labels.instance }} expires in {{ $value | humanizeDuration }}",
    ),
    Alert(
        "DistTrainCallsRefused",
        "warning",
        "5m",
        "sum by (job, instance) (rate(disttrain_refused_calls_total[15m])) > 0.1",
        "{{ $labels.instance }} refuses {{ $value | humanize }} calls a second",
    ),
)
GROUPS: Final = {"trainers": TRAINERS, "servers": SERVERS, "storage": STORAGE, "security": SECURITY}
