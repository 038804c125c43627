"""The panels of the dashboard: what a team on call looks at, from the trainers' wait to the processes.

Queries are PromQL with Grafana's variables. `$server` and `$rank` stand for the selectors of the dashboard's choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SERVER: Final = 'job=~"$job", instance=~"$instance"'
"""Labels of what `$server` selects."""
RANK: Final = f'{SERVER}, job_id=~"$job_id", module=~"$module"'
"""Labels of what `$rank` selects."""
SHOWN: Final = 20
"""Ranks that a panel shows of thousands: those that are worst off."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel."""

    text: str
    """Text of the query, with `$server` and `$rank` in braces."""
    legend: str
    """Name of each series, with labels in double braces."""

    @property
    def expr(self) -> str:
        """The query as Grafana is given it."""
        return self.text.replace("$server", SERVER).replace("$rank", RANK)


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: a graph over time, or with `stat` the newest value."""

    title: str
    about: str
    unit: str
    queries: tuple[Query, ...]
    stacked: bool = False
    stat: bool = False
    warn: float | None = None
    """A newest value from here on is orange."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels that stand under one heading."""

    title: str
    panels: Sequence[Panel]


def _stat(title: str, about: str, unit: str, text: str, warn: float | None = None) -> Panel:
    return Panel(title, about, unit, (Query(text, ""),), stat=True, warn=warn)


def _graph(title: str, about: str, unit: str, *queries: tuple[str, str], stacked: bool = False) -> Panel:
    return Panel(title, about, unit, tuple(Query(*query) for query in queries), stacked=stacked)


def _rate(metric: str, by: str = "", selector: str = "$server") -> str:
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({metric}{{{selector}}}[$__rate_interval]))"


_RANK_WAIT: Final = "max by (job_id, module, rank) (rate(disttrain_rank_waited_seconds_total{$rank}[$__rate_interval]))"
_FIRST: Final = "max by (job_id, module) (disttrain_rank_step{$rank})"
_RANK: Final = "{{module}} {{rank}} ({{job_id}})"
_MODULE: Final = "{{module}} ({{job_id}})"
_STAGES: Final = 'stage=~"planning|decoding|consumer"'

GLANCE: Final = Row(
    "At a glance",
    (
        _stat("Servers", "Servers that answer Prometheus.", "short", "count(disttrain_open_streams{$server})"),
        _stat("Streams", "Open streams of all servers.", "short", "sum(disttrain_open_streams{$server})"),
        _stat(
            "Trainers wait",
            "Share of the time in which a rank waits for data, on average. A tenth costs a tenth of the GPUs.",
            "percentunit",
            f"avg({_RANK_WAIT})",
            warn=0.1,
        ),
        _stat("Images", "Images decoded per second.", "short", _rate("disttrain_decoded_images_total")),
        _stat("Bytes", "Bytes that trainers took per second.", "Bps", _rate("disttrain_sent_bytes_total")),
        _stat(
            "Cores missing",
            "Cores that the trainers' pace needs beyond those that there are.",
            "short",
            "clamp_min(sum(disttrain_wanted_cores{$server}) - sum(disttrain_cores{$server}), 0)",
            warn=1,
        ),
    ),
)
TRAINERS: Final = Row(
    "Trainers",
    (
        _graph(
            "Wait for data by module",
            "Share of the time in which ranks wait for microbatches: the mean of a module, and its worst rank.",
            "percentunit",
            (f"avg by (job_id, module) ({_RANK_WAIT})", f"{_MODULE} mean"),
            (f"max by (job_id, module) ({_RANK_WAIT})", f"{_MODULE} worst"),
        ),
        _graph(
            "Wait for data, worst ranks",
            f"The {SHOWN} ranks that wait most.",
            "percentunit",
            (f"topk({SHOWN}, {_RANK_WAIT})", _RANK),
        ),
        _graph(
            "Lag, worst ranks",
            f"Steps behind the first rank of the same module; the {SHOWN} furthest behind.",
            "short",
            (
                f"topk({SHOWN}, {_FIRST} - on (job_id, module) group_right () "
                "max by (job_id, module, rank) (disttrain_rank_step{$rank}))",
                _RANK,
            ),
        ),
        _graph(
            "Steps per second",
            "By module, from the steps that clients report.",
            "short",
            ("avg by (job_id, module) (deriv(disttrain_rank_step{$rank}[$__rate_interval]))", _MODULE),
        ),
        _graph(
            "Ready microbatches, least",
            "Of the rank of each module that has the fewest. 0 for long means that it waits.",
            "short",
            ("min by (job_id, module) (disttrain_rank_ready_microbatches{$rank})", _MODULE),
        ),
        _graph(
            "Unread, worst ranks",
            "Seconds since a rank stopped taking what is ready for it: it computes, evaluates, hangs, or is gone.",
            "s",
            (f"topk({SHOWN}, max by (job_id, module, rank) (disttrain_rank_unread_seconds{{$rank}}))", _RANK),
        ),
    ),
)
STAGES: Final = Row(
    "Stages",
    (
        _graph(
            "What streams wait for",
            "Streams in each stage. With `consumer` all is well; `decoding` wants cores or storage; `planning` wants a "
            "look at the plans.",
            "short",
            (
                f"sum by (stage) (rate(disttrain_waited_seconds_total{{$server, {_STAGES}}}[$__rate_interval]))",
                "{{stage}}",
            ),
            stacked=True,
        ),
        _graph(
            "Waits that overlap with these",
            "Streams that would work ahead but find no memory, and jobs that wait for other jobs' planning.",
            "short",
            (
                'sum by (stage) (rate(disttrain_waited_seconds_total{$server, stage=~"memory|planning_queue"}'
                "[$__rate_interval]))",
                "{{stage}}",
            ),
        ),
        _graph(
            "Queued microbatches",
            "In the queues of all streams, by state.",
            "short",
            ("sum by (state) (disttrain_queued_microbatches{$server})", "{{state}}"),
            stacked=True,
        ),
        _graph(
            "Memory for working ahead",
            "Used share of --prefetch-bytes.",
            "percentunit",
            ("disttrain_prefetch_used_bytes{$server} / disttrain_prefetch_limit_bytes{$server}", "{{instance}}"),
        ),
        _graph(
            "Cores",
            "Cores of the servers, cores that they keep busy, and cores that the trainers' pace needs.",
            "short",
            ("sum(disttrain_cores{$server})", "there"),
            (_rate("process_cpu_seconds_total"), "busy"),
            ("sum(disttrain_wanted_cores{$server})", "wanted"),
        ),
        _graph(
            "CPU by server",
            "Busy share of a server's cores. A server that keeps trainers waiting with idle cores waits for storage.",
            "percentunit",
            (
                "rate(process_cpu_seconds_total{$server}[$__rate_interval]) / on (job, instance) "
                "disttrain_cores{$server}",
                "{{instance}}",
            ),
        ),
    ),
)
THROUGHPUT: Final = Row(
    "Throughput",
    (
        _graph(
            "Images by server",
            "Images decoded per second.",
            "short",
            (_rate("disttrain_decoded_images_total", "instance"), "{{instance}}"),
            stacked=True,
        ),
        _graph(
            "Bytes by transport",
            "Bytes that trainers took: over shared memory, data connections, or gRPC, which costs most CPU time.",
            "Bps",
            (_rate("disttrain_shared_bytes_total"), "shared memory"),
            (_rate("disttrain_direct_bytes_total"), "data connections"),
            (
                f"{_rate('disttrain_sent_bytes_total')} - {_rate('disttrain_shared_bytes_total')} - "
                f"{_rate('disttrain_direct_bytes_total')}",
                "gRPC",
            ),
            stacked=True,
        ),
        _graph(
            "Microbatches",
            "Made, and taken by trainers.",
            "short",
            (_rate("disttrain_prepared_microbatches_total"), "made"),
            (_rate("disttrain_sent_microbatches_total"), "taken"),
        ),
        _graph(
            "Streams by server",
            "Open streams, of at most --max-streams.",
            "short",
            ("disttrain_open_streams{$server}", "{{instance}}"),
            ("min(disttrain_max_streams{$server})", "limit of each"),
        ),
    ),
)
PLANS: Final = Row(
    "Plans",
    (
        _graph(
            "Time of a plan",
            "Seconds until a plan was made, waiting for other jobs included.",
            "s",
            *(
                (
                    f"histogram_quantile({share}, sum by (le) "
                    "(rate(disttrain_plan_seconds_bucket{$server}[$__rate_interval])))",
                    name,
                )
                for share, name in (("0.5", "median"), ("0.99", "99 of 100"))
            ),
        ),
        _graph(
            "Plans by source",
            "With --peers: made by their owner, fetched from it, or made in its stead because it gave none.",
            "short",
            (_rate("disttrain_plans_total", "source"), "{{source}}"),
        ),
        _graph(
            "Cached for jobs",
            "Share of --job-bytes, by kind. A full cache is normal, unless things are made again.",
            "percentunit",
            (
                "sum by (kind) (disttrain_cached_job_bytes{$server}) / on () group_left () "
                "sum(disttrain_cached_job_limit_bytes{$server})",
                "{{kind}}",
            ),
            stacked=True,
        ),
        _graph(
            "Made again for jobs",
            "Plans, windows and tables that were made within ten minutes after --job-bytes had no room for them.",
            "short",
            (_rate("disttrain_cached_job_remakes_total", "kind"), "{{kind}}"),
            (_rate("disttrain_cached_job_evictions_total"), "dropped, of all kinds"),
        ),
        _graph("Known jobs", "By server.", "short", ("disttrain_known_jobs{$server}", "{{instance}}")),
    ),
)
STORAGE: Final = Row(
    "Storage",
    (
        _graph(
            "Images read",
            "Encoded bytes of images, and bytes that object stores gave. Far more of these: shards are read again.",
            "Bps",
            (_rate("disttrain_read_bytes_total"), "images"),
            (_rate("disttrain_store_bytes_total"), "from stores"),
        ),
        _graph(
            "Cache hits by source",
            "Share of the images' bytes that no store was asked for. 0 where shards are local files.",
            "percentunit",
            (
                f"{_rate('disttrain_block_bytes_total', 'source')} / on () group_left () "
                f"{_rate('disttrain_read_bytes_total')}",
                "{{source}}",
            ),
            stacked=True,
        ),
        _graph(
            "Requests to stores",
            "For blocks of 8 MiB, and for single images whose block was not there yet.",
            "reqps",
            (_rate("disttrain_store_requests_total", "for"), "{{for}}"),
        ),
        _graph(
            "Failed reads",
            "Retried ones cost time. Those that are not end a stream, and its trainer goes to another server.",
            "short",
            (_rate("disttrain_storage_retries_total"), "retried"),
            (_rate("disttrain_storage_failures_total"), "failed for good"),
        ),
    ),
)
_FAILURES: Final = (
    ("images that cannot be decoded", 'disttrain_decoded_images_total{$server, result="invalid"}'),
    ("failed reads", "disttrain_storage_errors_total{$server}"),
    ("reads that failed for good", "disttrain_storage_failures_total{$server}"),
    ("streams that left their data connection", "disttrain_direct_fallbacks_total{$server}"),
    ("owners of blocks that gave nothing", "disttrain_owner_failures_total{$server}"),
    ("plans that owners did not give", 'disttrain_plans_total{$server, source=~"late|unreachable|refused|wrong"}'),
    ("refused calls", "disttrain_refused_calls_total{$server}"),
)
PROCESSES: Final = Row(
    "Failures and processes",
    (
        _graph(
            "Failures by kind",
            "In the last hour. The log of the servers names causes.",
            "short",
            *((f"sum(increase({metric}[1h]))", name) for name, metric in _FAILURES),
        ),
        _graph(
            "Resident memory",
            "Physical memory by server; shared pages count at every process that maps them.",
            "bytes",
            ("process_resident_memory_bytes{$server}", "{{instance}}"),
        ),
        _graph(
            "Open files",
            "Share of the process's limit.",
            "percentunit",
            ("process_open_fds{$server} / process_max_fds{$server}", "{{instance}}"),
        ),
        _graph(
            "Uptime",
            "Time since a server's process began.",
            "s",
            ("time() - process_start_time_seconds{$server}", "{{instance}}"),
        ),
        _graph(
            "Certificates expire in",
            "Time until the certificate of a server expires. Empty without TLS.",
            "s",
            ("disttrain_certificate_expiry_timestamp_seconds{$server} - time()", "{{instance}}"),
        ),
    ),
)
ROWS: Final = (GLANCE, TRAINERS, STAGES, THROUGHPUT, PLANS, STORAGE, PROCESSES)
