"""The numbers of a fleet as tables for people: rates between two answers of each server, and how far the ranks are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from disttrain.v1.admin_service_pb2 import GetMetricsResponse, RankProgress
from google.protobuf.duration_pb2 import Duration
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

MAX_RANKS_SHOWN: Final = 48
MAX_CHARS: Final = 64
"""Of a text that a server sent."""
STAGES: Final = ("planning", "decoding", "consumer")
"""Those that divide the time of a stream among them."""
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Answer:
    """What a server said last, and the time before; or why it said nothing."""

    address: str
    now: GetMetricsResponse | None = None
    before: GetMetricsResponse | None = None
    """Of the same process; None if there is no such answer."""
    problem: str = ""


def answered(address: str, now: GetMetricsResponse, before: GetMetricsResponse | None) -> Answer:
    """An answer with the one before it, unless the server was started again in between."""
    same = before is not None and _seconds(before.uptime) < _seconds(now.uptime)
    return Answer(address, now, before if same else None)


def fleet_tables(answers: Sequence[Answer]) -> Group:
    """Tables of servers and of ranks."""
    ranks = ranked({answer.address: answer.now for answer in answers if answer.now is not None})
    parts = [_servers(answers)]
    if ranks:
        parts.append(_ranks(ranks))
    return Group(*parts)


def _servers(answers: Iterable[Answer]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, caption_justify="left")
    table.add_column("server", no_wrap=True)
    for title in ("images/s", "MB/s", "streams", "memory", "ahead", "invalid", "storage"):
        table.add_column(title, justify="right")
    table.add_column("state")
    for answer in answers:
        if answer.now is None:
            table.add_row(_text(answer.address), *["-"] * 7, Text(_clean(answer.problem), style="red"))
        else:
            table.add_row(_text(answer.address), *_server_cells(answer.now, answer.before))
    table.caption = "state: what streams waited for most; consumer is the trainer. invalid, storage: since the start."
    return table


def _server_cells(now: GetMetricsResponse, before: GetMetricsResponse | None) -> list[str]:
    return [
        *rates(now, before),
        str(now.open_streams),
        f"{now.resident_bytes / _MIB:.0f} MiB",
        f"{now.prefetch_used_bytes / now.prefetch_limit_bytes:.0%}" if now.prefetch_limit_bytes else "-",
        str(now.invalid_images),
        str(now.storage_errors),
        slowest_stage(now, before),
    ]


def rates(now: GetMetricsResponse, before: GetMetricsResponse | None) -> tuple[str, str]:
    """Images and megabytes a second between two answers; `-` without two."""
    if before is None:
        return "-", "-"
    seconds = _seconds(now.uptime) - _seconds(before.uptime)
    images = (now.decoded_images - before.decoded_images) / seconds
    megabytes = (now.sent_bytes - before.sent_bytes) / seconds / 1e6
    return f"{images:.0f}", f"{megabytes:.1f}"


def slowest_stage(now: GetMetricsResponse, before: GetMetricsResponse | None) -> str:
    """The stage for which streams waited most between two answers, or since the start; `-` where none waited."""
    waits = {stage: _seconds(getattr(now.waits, stage)) for stage in STAGES}
    if before is not None:
        waits = {stage: seconds - _seconds(getattr(before.waits, stage)) for stage, seconds in waits.items()}
    total = sum(waits.values())
    if total <= 0:
        return "-"
    most = max(waits, key=lambda stage: waits[stage])
    return f"{most} {waits[most] / total:.0%}"


@dataclass(frozen=True)
class RankRow:
    """A rank, the server that it reads from, and how many steps it is behind the first rank of its job."""

    address: str
    progress: RankProgress
    lag: int | None


def ranked(answers: Mapping[str, GetMetricsResponse]) -> list[RankRow]:
    """All ranks by job, module and rank."""
    found = [(address, rank) for address, answer in answers.items() for rank in answer.ranks]
    first: dict[str, int] = {}
    for _, rank in found:
        if rank.HasField("sent_step"):
            first[rank.job] = max(first.get(rank.job, 0), rank.sent_step)
    rows = [
        RankRow(address, rank, first[rank.job] - rank.sent_step if rank.HasField("sent_step") else None)
        for address, rank in found
    ]
    return sorted(rows, key=lambda row: (row.progress.job, row.progress.module, row.progress.rank, row.address))


def most_behind(rows: Sequence[RankRow]) -> list[RankRow]:
    """As many rows as are shown, those furthest behind, in the order that they have."""
    ordered = sorted(rows, key=lambda row: (row.lag or 0, _seconds(row.progress.unread)), reverse=True)
    kept = set(map(id, ordered[:MAX_RANKS_SHOWN]))
    return [row for row in rows if id(row) in kept]


def _ranks(rows: Sequence[RankRow]) -> Table:
    table = Table("job", "module", box=box.SIMPLE_HEAD, caption_justify="left")
    for title in ("rank", "step", "lag", "ready", "unread"):
        table.add_column(title, justify="right")
    table.add_column("server")
    for row in most_behind(rows):
        rank = row.progress
        step = str(rank.sent_step) if rank.HasField("sent_step") else "-"
        lag = "-" if row.lag is None else str(row.lag)
        unread = f"{_seconds(rank.unread):.1f} s"
        cells = (str(rank.rank), step, lag, str(rank.ready_microbatches), unread)
        table.add_row(_text(rank.job), _text(rank.module), *cells, _text(row.address))
    more = len(rows) - MAX_RANKS_SHOWN
    table.caption = (
        "lag: steps behind the first rank of the job. ready: microbatches that wait. unread: since it took nothing."
        + (f" {more} more ranks are less far behind." if more > 0 else "")
    )
    return table


def _text(value: str) -> Text:
    return Text(_clean(value))


def _clean(value: str) -> str:
    """A text of a server without what would move the cursor."""
    return "".join(c if c.isprintable() else "?" for c in value[:MAX_CHARS])


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
