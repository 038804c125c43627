"""What the answers of a fleet say: rates between two answers of each server, and how far the ranks are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from disttrain.v1.admin_service_pb2 import GetMetricsResponse, RankProgress
from google.protobuf.duration_pb2 import Duration

MAX_RANKS_SHOWN: Final = 48
STAGES: Final = ("planning", "decoding", "consumer")
"""Those that divide the time of a stream among them."""


@dataclass(frozen=True)
class Answer:
    """What a server said last, and the time before; or why it said nothing."""

    address: str
    now: GetMetricsResponse | None = None
    before: GetMetricsResponse | None = None
    """The previous answer of the same process; None if there is none."""
    problem: str = ""


def answered(address: str, now: GetMetricsResponse, before: GetMetricsResponse | None) -> Answer:
    """An answer with the one before it, unless the server was started again in between."""
    same = before is not None and seconds_of(before.uptime) < seconds_of(now.uptime) and not _fell(now, before)
    return Answer(address, now, before if same else None)


def _fell(now: GetMetricsResponse, before: GetMetricsResponse) -> bool:
    """Whether a counter did: the server was started again, and has run for longer than before."""
    return any(later < sooner for later, sooner in zip(_counters(now), _counters(before), strict=True))


def _counters(answer: GetMetricsResponse) -> list[float]:
    waits = [seconds_of(getattr(answer.waits, stage)) for stage in STAGES]
    return [answer.decoded_images, answer.sent_bytes, *waits]


def throughput(now: GetMetricsResponse, before: GetMetricsResponse | None) -> tuple[float, float] | None:
    """Images and megabytes a second between two answers; None without two."""
    if before is None:
        return None
    seconds = seconds_of(now.uptime) - seconds_of(before.uptime)
    images = (now.decoded_images - before.decoded_images) / seconds
    return images, (now.sent_bytes - before.sent_bytes) / seconds / 1e6


def rates(now: GetMetricsResponse, before: GetMetricsResponse | None) -> tuple[str, str]:
    """Images and megabytes a second between two answers; `-` without two."""
    found = throughput(now, before)
    return ("-", "-") if found is None else (f"{found[0]:.0f}", f"{found[1]:.1f}")


def waited(now: GetMetricsResponse, before: GetMetricsResponse | None) -> dict[str, float]:
    """Seconds that streams waited for each of `STAGES` between two answers, or since the start."""
    waits = {stage: seconds_of(getattr(now.waits, stage)) for stage in STAGES}
    if before is not None:
        waits = {stage: seconds - seconds_of(getattr(before.waits, stage)) for stage, seconds in waits.items()}
    return waits


def waiting_at_a_time(now: GetMetricsResponse, before: GetMetricsResponse) -> dict[str, float]:
    """Streams that waited at a time for each of `STAGES` between two answers."""
    seconds = seconds_of(now.uptime) - seconds_of(before.uptime)
    return {stage: waits / seconds for stage, waits in waited(now, before).items()}


def limiting(waits: Mapping[str, float]) -> tuple[str, float] | None:
    """The stage with the longest of these waits, and its share of all; None where nothing waited."""
    total = sum(waits.values())
    if total <= 0:
        return None
    most = max(waits, key=lambda stage: waits[stage])
    return most, waits[most] / total


def slowest_stage(now: GetMetricsResponse, before: GetMetricsResponse | None) -> str:
    """The stage for which streams waited most between two answers, or since the start; `-` where none waited."""
    found = limiting(waited(now, before))
    return "-" if found is None else f"{found[0]} {found[1]:.0%}"


def cores_missing(answers: Sequence[GetMetricsResponse]) -> str:
    """How many cores a fleet has, and how many more or fewer its trainers want; empty where none want any."""
    found = [answer for answer in answers if answer.cores]
    cores, wanted = sum(answer.cores for answer in found), sum(answer.wanted_cores for answer in found)
    if wanted == 0:
        return ""
    more = wanted - cores
    verdict = f"{more:.1f} are missing" if more > 0 else f"{-more:.1f} are idle"
    return f"trainers want {wanted:.1f} cores and have {cores}: {verdict}"


@dataclass(frozen=True)
class RankRow:
    """A rank, the server that it reads from, and how many steps it is behind the first rank of its module."""

    address: str
    progress: RankProgress
    lag: int | None
    """None where the client has not said at which step its trainer is."""


def ranked(answers: Mapping[str, GetMetricsResponse]) -> list[RankRow]:
    """All ranks by job, module and rank."""
    found = [(address, rank) for address, answer in answers.items() for rank in answer.ranks]
    first: dict[tuple[str, str], int] = {}
    for _, rank in found:
        if rank.HasField("step"):
            module = rank.job, rank.module
            first[module] = max(first.get(module, 0), rank.step)
    rows = [
        RankRow(address, rank, first[rank.job, rank.module] - rank.step if rank.HasField("step") else None)
        for address, rank in found
    ]
    return sorted(rows, key=lambda row: (row.progress.job, row.progress.module, row.progress.rank, row.address))


def by_lag(rows: Sequence[RankRow]) -> list[int]:
    """Their places, those furthest behind first."""
    return sorted(range(len(rows)), key=lambda i: (rows[i].lag or 0, seconds_of(rows[i].progress.unread)), reverse=True)


def most_behind(rows: Sequence[RankRow]) -> list[RankRow]:
    """Return as many rows as are shown, those furthest behind, in the order that they have."""
    return [rows[i] for i in sorted(by_lag(rows)[:MAX_RANKS_SHOWN])]


def seconds_of(duration: Duration) -> float:
    """The seconds of a duration, as a float."""
    return duration.seconds + duration.nanos / 1e9
