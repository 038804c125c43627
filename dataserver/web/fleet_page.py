"""The page of a fleet as JSON: what `dataserver top` and `dataserver doctor` say, in numbers."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, Final

from disttrain.v1.admin_service_pb2 import (
    GetMetricsResponse,
    ListFailuresResponse,
)

from dataserver.dataset import printable
from dataserver.reporting.fleet_checks import Finding, check
from dataserver.reporting.fleet_failures import COUNTERS, KINDS, unreadable
from dataserver.reporting.fleet_numbers import (
    STAGES,
    Answer,
    RankRow,
    by_lag,
    cores_missing,
    limiting,
    ranked,
    seconds_of,
    throughput,
    waited,
)
from dataserver.web.fleet_watch import Check, FleetWatch, Look, Point, without
from dataserver.web.rank_waits import RankOfJob
from dataserver.web.server import Query, json_bytes
from dataserver.web.visitors import MayRead

MAX_CHARS: Final = 256
"""Most characters of a text that a server sent."""
MAX_RANKS: Final = 8192
"""Ranks that are sent to a page; those furthest behind come first where there are more."""
MAX_FAILED: Final = 200
"""Failed samples and shards that are sent to a page, the newest."""


class FleetPage:
    """Turns the newest look into JSON, once for all who ask. Thread-safe."""

    def __init__(self, watch: FleetWatch, may_read: MayRead | None = None) -> None:
        """Show what `watch` sees.

        Args:
            watch: looks at the servers.
            may_read: whether who asks may read a dataset; None where all may be shown.
        """
        self._watch, self._may_read = watch, may_read
        self._lock = threading.Lock()
        self._of: tuple[object, ...] = ()
        self._hid: frozenset[str] = frozenset()
        self._made = b""

    def document(self, _query: Query) -> bytes:
        """Everything that the page shows, as JSON; answers at once."""
        look, checked, points = self._watch.newest()
        waits, defects = self._watch.waits(), self._watch.defects()
        hidden = self._hidden(checked)
        with self._lock:
            of = look, checked, waits, defects
            if hidden != self._hid or not self._made or any(a is not b for a, b in zip(self._of, of, strict=True)):
                self._of, self._hid = of, hidden
                checked = checked and without(checked, hidden)
                self._made = json_bytes(_document(self._watch, look, checked, points, waits, defects))
            return self._made

    def _hidden(self, checked: Check | None) -> frozenset[str]:
        """The datasets that servers name and that may not be shown."""
        may_read = self._may_read
        if checked is None or may_read is None:
            return frozenset()
        return frozenset(name for name in checked.dataset_names() if not may_read(name))


def _document(
    watch: FleetWatch,
    look: Look | None,
    checked: Check | None,
    points: Sequence[Point],
    waits: Mapping[RankOfJob, float],
    defects: Mapping[str, str],
) -> dict[str, Any]:
    answers = [] if look is None else look.answers
    found = {answer.address: answer.now for answer in answers if answer.now is not None}
    return {
        "looked_at": None if look is None else look.at,
        "interval_s": watch.interval_s,
        "named": len(watch.servers.names),
        "defects": [f"{what} cannot be looked at: {printable(why, 2 * MAX_CHARS)}" for what, why in defects.items()],
        "servers": [_server(answer) for answer in answers],
        "verdict": _verdict(answers),
        "cores": cores_missing(list(found.values())),
        "caches": _caches(list(found.values())),
        "failures": list(_failures(found)),
        "failed": [] if checked is None else _failed(checked.failed),
        "checks": None if checked is None else _checks(checked),
        "history": _history(points),
        **_ranks(ranked(found), waits),
    }


def _server(answer: Answer) -> dict[str, Any]:
    address, now = printable(answer.address, MAX_CHARS), answer.now
    if now is None:
        return {"address": address, "problem": printable(answer.problem, MAX_CHARS)}
    rates = throughput(now, answer.before)
    return {
        "address": address,
        "images_s": None if rates is None else rates[0],
        "megabytes_s": None if rates is None else rates[1],
        "streams": now.open_streams,
        "ready": now.ready_microbatches,
        "preparing": now.preparing_microbatches,
        "prefetch_used": now.prefetch_used_bytes,
        "prefetch_limit": now.prefetch_limit_bytes,
        "resident": now.resident_bytes,
        "cores": now.cores,
        "wanted_cores": now.wanted_cores if isfinite(now.wanted_cores) else None,
        "uptime_s": seconds_of(now.uptime),
        "invalid_images": now.invalid_images,
        "storage_errors": now.storage_errors,
        "waits": waited(now, answer.before),
    }


def _verdict(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """The stage that the fleet's streams waited for most since the last look; None where none waited."""
    waits = dict.fromkeys(STAGES, 0.0)
    for answer in answers:
        if answer.now is None or answer.before is None:  # what was waited since the server began is no news
            continue
        for stage, seconds in waited(answer.now, answer.before).items():
            waits[stage] += seconds
    found = limiting(waits)
    return None if found is None else {"stage": found[0], "share": found[1]}


def _caches(answers: Sequence[GetMetricsResponse]) -> list[dict[str, Any]]:
    """How much of what was asked for came from caches; only of those that were asked at all."""
    plans = [a.plans_by_source for a in answers]
    made = sum(p.own + p.late + p.unreachable + p.refused + p.wrong for p in plans)
    stores = [a.store_reads for a in answers]
    sources = {
        "memory": sum(s.memory_bytes for s in stores),
        "disk": sum(s.disk_bytes for s in stores),
        "owners": sum(s.owner_bytes for s in stores),
    }
    found = [
        _hits("plans fetched from their owners", sum(p.fetched for p in plans), made, "plans"),
        _hits("image bytes from blocks", sum(sources.values()), sum(s.bytes for s in stores), "bytes", sources),
    ]
    cached = [a.cached for a in answers]
    limit = sum(c.limit for c in cached)
    used = {kind: sum(getattr(c, kind) for c in cached) for kind in ("jobs", "tables", "windows", "plans")}
    jobs = {"name": "memory for jobs", "used": sum(used.values()), "of": limit, "unit": "bytes", "parts": used}
    return [*(entry for entry in found if entry["of"]), *([jobs] if limit else [])]


def _hits(name: str, hits: int, others: int, unit: str, parts: Mapping[str, int] | None = None) -> dict[str, Any]:
    return {"name": name, "used": hits, "of": hits + others, "unit": unit, "parts": dict(parts or {})}


def _failures(answers: Mapping[str, GetMetricsResponse]) -> Iterator[dict[str, Any]]:
    for kind, count_of in COUNTERS.items():
        counts = {address: int(count) for address, found in answers.items() if (count := count_of(found))}
        if counts:
            most = max(counts, key=lambda address: counts[address])
            yield {
                "kind": kind,
                "count": sum(counts.values()),
                "servers": len(counts),
                "most": printable(most, MAX_CHARS),
            }


def _failed(told: Mapping[str, ListFailuresResponse]) -> list[dict[str, Any]]:
    """Samples and shards that failed lately, the newest first."""
    newest = [(failure.last.seconds, address, failure) for address, found in told.items() for failure in found.failures]
    newest.sort(key=lambda one: -one[0])
    return [
        {
            "server": printable(address, MAX_CHARS),
            "kind": KINDS.get(failure.kind, "unknown"),
            "dataset": printable(failure.dataset, MAX_CHARS),
            "shard": printable(failure.shard, MAX_CHARS),
            "key": printable(failure.key, MAX_CHARS),
            "count": failure.count,
            "last": last,
            "reason": printable(failure.reason, MAX_CHARS),
        }
        for last, address, failure in newest[:MAX_FAILED]
    ]


def _checks(checked: Check) -> dict[str, Any]:
    try:
        found = [*check(checked.seen, checked.at), *unreadable(checked.seen, checked.failed, checked.at)]
    except (ValueError, OverflowError, OSError) as error:  # such as a date beyond all calendars
        servers = tuple(one.address for one in checked.seen)
        found = [Finding(servers, f"one of them says what cannot be: {error}", "see what listens there")]
    findings = [Finding((name,), why, remedy) for name, (why, remedy) in checked.silent.items()] + found
    return {
        "at": checked.at,
        "releases": sorted({printable(one.info.release, MAX_CHARS) for one in checked.seen}),
        "findings": [
            {
                "servers": [printable(server, MAX_CHARS) for server in finding.servers],
                "what": printable(finding.what, 2 * MAX_CHARS),
                "remedy": printable(finding.remedy, 2 * MAX_CHARS),
            }
            for finding in findings
        ],
    }


def _history(points: Sequence[Point]) -> dict[str, Any]:
    return {
        "time": [point.at for point in points],
        "images_s": [point.images_s for point in points],
        "megabytes_s": [point.megabytes_s for point in points],
        "waiting": {stage: [point.waiting[i] for point in points] for i, stage in enumerate(STAGES)},
    }


def _ranks(rows: Sequence[RankRow], waits: Mapping[RankOfJob, float]) -> dict[str, Any]:
    """The ranks as columns, those furthest behind first: a thousand of them are a third as many bytes so."""
    ordered = [rows[i] for i in by_lag(rows)[:MAX_RANKS]]
    return {
        "num_ranks": len(rows),
        "ranks": {
            "job": [printable(row.progress.job, MAX_CHARS) for row in ordered],
            "module": [printable(row.progress.module, MAX_CHARS) for row in ordered],
            "rank": [row.progress.rank for row in ordered],
            "step": [row.progress.step if row.lag is not None else None for row in ordered],
            "lag": [row.lag for row in ordered],
            "ready": [row.progress.ready_microbatches for row in ordered],
            "preparing": [row.progress.preparing_microbatches for row in ordered],
            "unread_s": [seconds_of(row.progress.unread) for row in ordered],
            "wait": [waits.get((row.progress.job, row.progress.module, row.progress.rank)) for row in ordered],
            "server": [printable(row.address, MAX_CHARS) for row in ordered],
        },
    }
