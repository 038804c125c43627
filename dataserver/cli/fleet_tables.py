"""The numbers of a fleet as tables that fit a terminal: its servers, the ranks that they serve, and what failed."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from disttrain.v1.admin_service_pb2 import GetMetricsResponse
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from dataserver.cli.fitted_table import HEAD_LINES, Column, FittedTable, Kind, fit
from dataserver.planning.plan.naming import counted
from dataserver.reporting.fleet_calls import DOES_NOT_ANSWER
from dataserver.reporting.fleet_failures import Failed
from dataserver.reporting.fleet_numbers import (
    Answer,
    RankRow,
    by_lag,
    cores_missing,
    most_behind,
    ranked,
    rates,
    seconds_of,
    slowest_stage,
)

MAX_CHARS: Final = 64
"""Most characters shown of a text that a server sent."""
MAX_NOTE_WIDTH: Final = 110
MIN_LINES_OF_SUMMARY: Final = 6
"""Fewer lines are for rows alone."""
KEEP_OF_SERVERS: Final = (
    *("server", "state", "images/s", "MB/s", "streams"),
    *("memory", "ahead", "storage", "wanted", "cores", "invalid", "fallbacks"),
)
"""Columns, the one that is left out last first."""
KEEP_OF_RANKS: Final = ("module", "rank", "lag", "step", "job", "unread", "server", "ready")
KEEP_OF_FAILED: Final = ("kind", "key", "shard", "count", "dataset", "why", "last", "at")
MAX_FAILED: Final = 48
SHARE_OF_RANKS: Final = 1 / 3
SHARE_OF_FAILED: Final = 1 / 5
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class _Rows:
    """A table, and which of its rows go first where there are too many."""

    fitted: FittedTable
    order: Sequence[int]
    more: Callable[[Sequence[int]], str]
    """What to say of these rows, which are not shown."""
    red: frozenset[int] = frozenset()
    beyond: int = 0
    """Rows that the table never shows."""
    summary: str = ""
    """A line about all rows."""
    share: float = 1.0
    """Largest share of a terminal's lines, while other tables need theirs."""

    def within(self, lines: int) -> list[int]:
        """The first rows that take no more lines, one at least unless there is none, in the order of the table."""
        shown: list[int] = []
        for row in self.order:
            lines -= self.fitted.row_lines[row]
            if lines < 0 and (shown or lines + self.fitted.row_lines[row] <= 0):
                break
            shown.append(row)
        return sorted(shown)

    def lines(self, shown: Sequence[int]) -> int:
        """How many these rows take."""
        return sum(self.fitted.row_lines[row] for row in shown)


@dataclass(frozen=True)
class _Part:
    """Some rows of a table, and the lines below them."""

    rows: _Rows
    shown: Sequence[int]
    notes: Sequence[str]

    @property
    def lines(self) -> int:
        """How many lines the table takes."""
        return len(self.notes) + (HEAD_LINES + self.rows.lines(self.shown) if self.shown else 0)

    def pieces(self) -> list[RenderableType]:
        """The parts of the table to print, from the top."""
        table: list[RenderableType] = [self.rows.fitted.table(self.shown, self.rows.red)] if self.shown else []
        return table + [Text(note, style="dim") for note in self.notes]


def fleet_tables(
    answers: Sequence[Answer], width: int, height: int | None = None, failed: Sequence[Failed] = ()
) -> Group:
    """Tables of servers, of ranks, and of what failed.

    Args:
        answers: of all servers.
        width: characters of a line, to which columns are limited.
        height: lines to which rows are limited; None shows all.
        failed: samples and shards, the newest first.
    """
    tables = [_servers(answers, width)]
    if ranks := ranked({answer.address: answer.now for answer in answers if answer.now is not None}):
        tables.append(_ranks(ranks, width))
    if failed:
        tables.append(_failed(failed, width))
    view: list[_Part] = []
    for view in _views(tables, width, height or 0):
        if height is None or sum(part.lines for part in view) + len(view) - 1 <= height:
            break
    pieces: list[RenderableType] = []
    for part in view:
        pieces += [*([""] if pieces else []), *part.pieces()]
    return Group(*pieces)


def _views(tables: Sequence[_Rows], width: int, height: int) -> Iterator[list[_Part]]:
    """Less and less of the tables."""
    everything = [sorted(rows.order) for rows in tables]
    yield _parts(tables, everything, width, legends=True)
    yield _parts(tables, everything, width)
    for lines in range(height, 0, -1):
        yield _parts(tables, _divided(tables, lines), width, summaries=lines >= MIN_LINES_OF_SUMMARY)


def _divided(tables: Sequence[_Rows], lines: int) -> list[list[int]]:
    """The rows that so many lines have room for: servers get what the shares of the other tables leave, and what one
    table does not need goes to the next."""
    servers, *others = tables
    reserved = [min(int(lines * rows.share), rows.lines(rows.order)) for rows in others]
    shown = [servers.within(lines - sum(reserved))]
    for number, rows in enumerate(others):
        lines -= tables[number].lines(shown[-1])
        shown.append(rows.within(lines - sum(reserved[number + 1 :])))
    return shown


def _parts(
    tables: Sequence[_Rows], shown: Sequence[list[int]], width: int, legends: bool = False, summaries: bool = True
) -> list[_Part]:
    parts = []
    for rows, seen in zip(tables, shown, strict=True):
        hidden = sorted(set(rows.order) - set(seen))
        notes = [rows.summary] if rows.summary and summaries else []
        notes += [rows.more(hidden)] if len(hidden) + rows.beyond else []
        if seen and rows.fitted.left_out:
            notes.append(f"wider terminals show: {', '.join(rows.fitted.left_out)}")
        if legends:
            notes.append(rows.fitted.legend)
        lines = [line for note in notes for line in textwrap.wrap(note, min(width, MAX_NOTE_WIDTH))]
        parts.append(_Part(rows, seen, lines))
    return parts


def _servers(answers: Sequence[Answer], width: int) -> _Rows:
    """Those that answer go first."""
    cells = [
        ["-"] * 10 + [_clean(answer.problem)] if answer.now is None else _server_cells(answer.now, answer.before)
        for answer in answers
    ]
    columns = [Column("server", [_clean(answer.address) for answer in answers], Kind.NAMES)]
    about = {
        "invalid": "images, since the start",
        "storage": "failed reads, since the start",
        "fallbacks": "streams that left their data connection for gRPC, since the start",
        "wanted": "cores for all that trainers can take",
    }
    titles = ("images/s", "MB/s", "streams", "memory", "ahead", "invalid", "storage", "fallbacks", "cores", "wanted")
    figures = list(zip(*cells, strict=True))
    columns += [Column(title, figures[i], about=about.get(title, "")) for i, title in enumerate(titles)]
    waited = "what streams waited for most; consumer is the trainer"
    columns.append(Column("state", figures[-1], Kind.WORDS, waited))
    failed = frozenset(i for i, answer in enumerate(answers) if answer.now is None)

    def more(hidden: Sequence[int]) -> str:
        problems = [answers[i].problem for i in hidden if i in failed]
        silent = problems.count(DOES_NOT_ANSWER)
        others = len(problems) - silent
        said = [f"{silent} {'does' if silent == 1 else 'do'} not answer"] if silent else []
        said += [f"{others} without numbers"] if others else []
        return f"... and {counted(len(hidden), 'more server')}" + (f" ({', '.join(said)})" if said else "")

    order = sorted(range(len(answers)), key=lambda i: i in failed)
    summary = cores_missing([answer.now for answer in answers if answer.now is not None])
    return _Rows(fit(columns, KEEP_OF_SERVERS, width), order, more, failed, summary=summary)


def _server_cells(now: GetMetricsResponse, before: GetMetricsResponse | None) -> list[str]:
    return [
        *rates(now, before),
        str(now.open_streams),
        f"{now.resident_bytes / _MIB:.0f} MiB",
        f"{now.prefetch_used_bytes / now.prefetch_limit_bytes:.0%}" if now.prefetch_limit_bytes else "-",
        str(now.invalid_images),
        str(now.storage_errors),
        str(now.direct_fallbacks),
        str(now.cores or "-"),
        f"{now.wanted_cores:.1f}" if now.cores else "-",
        slowest_stage(now, before),
    ]


def _ranks(ranks: Sequence[RankRow], width: int) -> _Rows:
    """Those furthest behind go first."""
    rows = most_behind(ranks)
    beyond = len(ranks) - len(rows)
    columns = [
        Column("job", [_clean(row.progress.job) for row in rows], Kind.NAMES),
        Column("module", [_clean(row.progress.module) for row in rows], Kind.NAMES),
        Column("rank", [str(row.progress.rank) for row in rows]),
        Column("step", [str(row.progress.step) if row.lag is not None else "-" for row in rows]),
        Column("lag", ["-" if row.lag is None else str(row.lag) for row in rows],
               about="steps behind the first rank of the module"),
        Column("ready", [str(row.progress.ready_microbatches) for row in rows], about="microbatches that wait"),
        Column("unread", [f"{seconds_of(row.progress.unread):.1f} s" for row in rows], about="since it took nothing"),
        Column("server", [_clean(row.address) for row in rows], Kind.NAMES),
    ]  # fmt: skip

    def more(hidden: Sequence[int]) -> str:
        count = beyond + len(hidden)
        if count == len(ranks):
            return f"... and {counted(count, 'rank')}"
        return f"... and {counted(count, 'more rank')} {'is' if count == 1 else 'are'} less far behind"

    return _Rows(fit(columns, KEEP_OF_RANKS, width), by_lag(rows), more, beyond=beyond, share=SHARE_OF_RANKS)


def _failed(failed: Sequence[Failed], width: int) -> _Rows:
    """Rows of what failed, the newest first."""
    rows = failed[:MAX_FAILED]
    at = [one.servers[0] if len(one.servers) == 1 else f"{len(one.servers)} servers" for one in rows]
    columns = [
        Column("kind", [one.kind for one in rows], about="an image, a read of a shard, or the text of a sample"),
        Column("dataset", [_clean(one.dataset) for one in rows], Kind.NAMES),
        Column("shard", [_clean(one.shard) for one in rows], Kind.NAMES),
        Column("key", [_clean(one.key) or "-" for one in rows], Kind.NAMES),
        Column("count", [str(one.count) for one in rows]),
        Column("last", [one.when for one in rows]),
        Column("at", [_clean(name) for name in at], Kind.NAMES),
        Column("why", [_clean(one.reason) for one in rows], Kind.WORDS),
    ]

    def more(hidden: Sequence[int]) -> str:
        count = len(failed) - len(rows) + len(hidden)
        return f"... and {counted(count, 'more sample or shard', 'more samples or shards')} failed lately"

    table = fit(columns, KEEP_OF_FAILED, width)
    return _Rows(table, range(len(rows)), more, beyond=len(failed) - len(rows), share=SHARE_OF_FAILED)


def _clean(value: str) -> str:
    """A text of a server without what would move the cursor, or take other than one place."""
    return "".join(c if c.isprintable() and cell_len(c) == 1 else "?" for c in value[:MAX_CHARS])
