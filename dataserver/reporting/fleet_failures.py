"""What failed in a fleet: counters by kind, and the samples and shards that servers remember."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import localtime, monotonic, strftime
from typing import Final

import grpc
from disttrain.v1.admin_service_pb2 import (
    FAILURE_KIND_IMAGE,
    FAILURE_KIND_READ,
    FAILURE_KIND_TEXT,
    GetMetricsResponse,
    ListFailuresRequest,
    ListFailuresResponse,
)

from dataserver.dataset import printable
from dataserver.reporting.fleet_calls import LIST_FAILURES, ask_all
from dataserver.reporting.fleet_checks import Finding, Seen
from dataserver.reporting.fleet_numbers import Answer

KINDS: Final[Mapping[int, str]] = {FAILURE_KIND_IMAGE: "image", FAILURE_KIND_READ: "read", FAILURE_KIND_TEXT: "text"}
COUNTERS: Final[Mapping[str, Callable[[GetMetricsResponse], int]]] = {
    "invalid images": lambda found: found.invalid_images,
    "failed reads of storage": lambda found: found.storage_errors,
    "reads tried again": lambda found: found.storage_retries,
    "reads that failed for good": lambda found: found.storage_failures,
    "streams that left their data connection": lambda found: found.direct_fallbacks,
    "plans: owner was late": lambda found: found.plans_by_source.late,
    "plans: owner unreachable": lambda found: found.plans_by_source.unreachable,
    "plans: owner refused": lambda found: found.plans_by_source.refused,
    "plans: owner was wrong": lambda found: found.plans_by_source.wrong,
    "owners of blocks gave nothing": lambda found: found.store_reads.owner_failures,
}
"""Counters of what went wrong, since each server began."""
AGAIN_S: Final = 30.0
"""Servers are asked again what failed after this time, or sooner where their counters have grown."""
SOONEST_S: Final = 5.0
ANSWER_S: Final = 2.0
RECENT_S: Final = 3600.0
"""A read that failed this long ago may still fail."""
_MAX_CHARS: Final = 256
_LATEST: Final = 1 << 36
"""Seconds since 1970 that are a date."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A sample or a shard that failed at one or several servers."""

    kind: str
    """One of `KINDS`, or `unknown`."""
    dataset: str
    shard: str
    key: str
    """Key of the sample; empty for a shard."""
    count: int
    last: int
    """Seconds since 1970, by the clock of the server where it failed last."""
    reason: str
    servers: tuple[str, ...]

    @property
    def when(self) -> str:
        """The time of `last` on this machine's clock, for people."""
        return strftime("%m-%d %H:%M:%S", localtime(self.last)) if 0 <= self.last < _LATEST else "-"

    def and_at(self, other: "Failed") -> "Failed":
        """The same sample or shard, with how it failed at other servers."""
        newest = max(self, other, key=lambda failed: failed.last)
        servers = tuple(dict.fromkeys((*self.servers, *other.servers)))
        return replace(newest, count=self.count + other.count, servers=servers)


def failed_in(told: Mapping[str, ListFailuresResponse]) -> list[Failed]:
    """Samples and shards that failed lately, those of all servers together, the newest first; texts are printable."""
    found: dict[tuple[str, ...], Failed] = {}
    for server, answer in told.items():
        for one in answer.failures:
            kind, reason = KINDS.get(one.kind, "unknown"), printable(one.reason, _MAX_CHARS)
            dataset, shard, key = (printable(text, _MAX_CHARS) for text in (one.dataset, one.shard, one.key))
            new = Failed(kind, dataset, shard, key, one.count, one.last.seconds, reason, (server,))
            before = found.get((kind, dataset, shard, key))
            found[kind, dataset, shard, key] = new if before is None else before.and_at(new)
    return sorted(found.values(), key=lambda failed: -failed.last)


class FailureWatch:
    """Asks servers what failed: where their counters have grown, and all of them now and then. For one thread."""

    def __init__(self, channels: Mapping[str, grpc.Channel]) -> None:
        self._channels = channels
        self._told: dict[str, ListFailuresResponse] = {}
        self._counts: dict[str, tuple[int, ...]] = {}
        self._asked_at = float("-inf")

    def look(self, answers: Sequence[Answer]) -> list[Failed]:
        """What failed lately, as far as it is known after these answers; asks no server longer than `ANSWER_S`."""
        counts = {a.address: tuple(of(a.now) for of in COUNTERS.values()) for a in answers if a.now is not None}
        since_s = monotonic() - self._asked_at
        if since_s >= AGAIN_S or (since_s >= SOONEST_S and counts != self._counts):
            asked = {address: channel for address, channel in self._channels.items() if address in counts}
            for reply in ask_all(asked, LIST_FAILURES, ListFailuresRequest(), ANSWER_S):
                if reply.message is not None:  # an older server lists none, and its counters are shown all the same
                    self._told[reply.address] = reply.message
            self._counts, self._asked_at = counts, monotonic()
        return failed_in(self._told)


def unreadable(fleet: Sequence[Seen], told: Mapping[str, ListFailuresResponse], now: float) -> Iterator[Finding]:
    """Findings for datasets whose shards or token ids could not be read within the last hour.

    Args:
        fleet: the servers that answered.
        told: what they remember of failures.
        now: our clock, in seconds since 1970.
    """
    since = {one.address: now + one.clock_s - RECENT_S for one in fleet}
    recent = {
        server: ListFailuresResponse(failures=[f for f in said.failures if f.last.seconds > since[server]])
        for server, said in told.items()
        if server in since
    }
    found: dict[tuple[str, str], list[Failed]] = {}
    for failed in failed_in(recent):
        if failed.kind in _REMEDIES:
            found.setdefault((failed.kind, failed.dataset), []).append(failed)
    for (kind, dataset), those in found.items():
        servers = tuple(dict.fromkeys(server for failed in those for server in failed.servers))
        what, remedy = _REMEDIES[kind]
        worst = max(those, key=lambda failed: failed.count)
        named = f"{worst.shard}, sample {worst.key}" if worst.key else worst.shard
        more = f" and of {len(those) - 1} more" if len(those) > 1 else ""
        yield Finding(servers, f"{what} of shard {named}{more} of dataset {dataset} failed: {worst.reason}", remedy)


_REMEDIES: Final[Mapping[str, tuple[str, str]]] = {
    "read": (
        "reads",
        "look at the storage, and at the log of these servers; `dataserver lint` compares shards with their index",
    ),
    "text": (
        "token ids",
        "see whether all servers have the same index; count tokens again with dataserver index --tokenizer",
    ),
}
