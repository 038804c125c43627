"""What a server counts of itself.

Others report in one line, at most once for each microbatch or task of images. What can be read when it is asked for,
such as memory in use, is not counted here but read for the message (`metrics_message.py`).
"""

import os
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from time import monotonic
from typing import Final

from dataserver.fleet.plan_source import PlanSource
from dataserver.serving.cpu_time import cpu_seconds
from dataserver.serving.failures import Failures
from dataserver.serving.wanted_cores import Usage

PLAN_BUCKETS_S: Final = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histogram of plans, in seconds; a last bucket has none."""


class Stage(StrEnum):
    """What a stream waits for. At any time an open stream is in one of the first three."""

    PLANNING = "planning"
    """Its consumer is ready, and the plan of the next microbatch is not there yet."""
    DECODING = "decoding"
    """Its consumer is ready, and the next microbatch is in the making, or waits for its turn to be laid out."""
    CONSUMER = "consumer"
    """A microbatch is ready, and its consumer has not taken all of it."""
    MEMORY = "memory"
    """It would work ahead, and the budget that streams share is used up."""
    PLANNING_QUEUE = "planning_queue"
    """Planning for a job, on behalf of all its streams, is queued while other jobs compute."""


@dataclass(slots=True)
class Counts:
    """Totals since the server began."""

    prepared_microbatches: int = 0
    sent_microbatches: int = 0
    decoded_images: int = 0
    invalid_images: int = 0
    storage_errors: int = 0
    storage_retries: int = 0
    storage_failures: int = 0
    read_bytes: int = 0
    sent_bytes: int = 0
    shared_bytes: int = 0
    direct_bytes: int = 0
    direct_fallbacks: int = 0
    plan_seconds: float = 0.0
    plans: list[int] = field(default_factory=lambda: [0] * (len(PLAN_BUCKETS_S) + 1))
    """Plans made, by bucket of `PLAN_BUCKETS_S`; not cumulative."""
    plans_by_source: dict[PlanSource, int] = field(default_factory=lambda: dict.fromkeys(PlanSource, 0))


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the streams of one rank are; where there are several, the one that is furthest behind."""

    job_id: str
    """The id of the job, cut to `JOB_CHARS`."""
    module: str
    rank: int
    sent_step: int | None
    """Step of the microbatch that was sent last; None before the first."""
    step: int | None
    """Step of the microbatch that the trainer took last, as its client said; None if it has said nothing."""
    ready: int
    """Microbatches that wait for the consumer."""
    preparing: int
    """Microbatches in the making behind them."""
    unread_s: float
    """Seconds for which the consumer has not taken the message that it is offered."""
    waited_s: float | None = None
    """Seconds that the trainer waited for microbatches, as its client said; None if it has said nothing."""


class Wait:
    """A wait that goes on."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.since = stage, monotonic()


class Metrics:
    """The counters of one server. Thread-safe; its lock is the last one taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = monotonic()
        self._counts = Counts()
        self._waited = dict.fromkeys(Stage, 0.0)
        self._waits: dict[Wait, None] = {}
        self.failures = Failures()
        """Where images and reads failed lately."""

    def prepared(self, num_images: int, num_invalid: int) -> None:
        """A microbatch is ready, with so many images decoded, some of them invalid."""
        with self._lock:
            self._counts.prepared_microbatches += 1
            self._counts.decoded_images += num_images
            self._counts.invalid_images += num_invalid

    def sent(self, num_bytes: int, *, shared_bytes: int = 0, direct_bytes: int = 0) -> None:
        """A consumer took a whole microbatch; so much of it lies in shared memory, or went over a data connection."""
        with self._lock:
            self._counts.sent_microbatches += 1
            self._counts.sent_bytes += num_bytes
            self._counts.shared_bytes += shared_bytes
            self._counts.direct_bytes += direct_bytes

    def direct_ended(self) -> None:
        """A client left its data connection for gRPC."""
        with self._lock:
            self._counts.direct_fallbacks += 1

    def read(self, num_bytes: int) -> None:
        """So many bytes of images were read from shards."""
        with self._lock:
            self._counts.read_bytes += num_bytes

    def storage_failed(self, retried: bool, final: bool) -> None:
        """Storage failed once; whether it is read again, or that was the last try. Neither if it is not wanted now."""
        with self._lock:
            self._counts.storage_errors += 1
            self._counts.storage_retries += retried
            self._counts.storage_failures += final

    def planned(self, seconds: float) -> None:
        """A plan was made within so many seconds."""
        with self._lock:
            self._counts.plan_seconds += seconds
            self._counts.plans[bisect_left(PLAN_BUCKETS_S, seconds)] += 1

    def plan_found(self, source: PlanSource) -> None:
        """Streams have a plan, from there."""
        with self._lock:
            self._counts.plans_by_source[source] += 1

    def begin(self, stage: Stage) -> Wait:
        """A wait begins, and counts until `end`."""
        wait = Wait(stage)
        with self._lock:
            self._waits[wait] = None
        return wait

    def end(self, wait: Wait | None) -> None:
        """A wait is over; without effect if there is none, or it was over."""
        with self._lock:
            if wait in self._waits:
                del self._waits[wait]
                self._waited[wait.stage] += monotonic() - wait.since

    @contextmanager
    def waiting(self, stage: Stage) -> Iterator[None]:
        """A wait that lasts as long as the block."""
        wait = self.begin(stage)
        try:
            yield
        finally:
            self.end(wait)

    @property
    def uptime_s(self) -> float:
        """Seconds since the server began."""
        return monotonic() - self._began

    def counts(self) -> Counts:
        """A copy of the totals."""
        with self._lock:
            counts = self._counts
            return replace(counts, plans=list(counts.plans), plans_by_source=dict(counts.plans_by_source))

    def waited_s(self) -> dict[Stage, float]:
        """Seconds waited by stage. They never decrease: waits that go on count until now."""
        with self._lock:
            now, found = monotonic(), dict(self._waited)
            for wait in self._waits:
                found[wait.stage] += max(now - wait.since, 0.0)
            return found


def usage_of(uptime_s: float, waited_s: Mapping[Stage, float]) -> Usage:
    """What this process and those that it started have used so far, and how long trainers waited for it."""
    waited = waited_s[Stage.PLANNING] + waited_s[Stage.DECODING]
    return Usage(uptime_s, cpu_seconds(), waited, waited + waited_s[Stage.CONSUMER])


def cumulative(plans: Iterable[int]) -> list[int]:
    """Plans at or below each bound of `PLAN_BUCKETS_S`, and in the end all."""
    return list(accumulate(plans))


def resident_bytes() -> int:
    """Physical memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def by_rank(streams: Iterable[Progress]) -> list[Progress]:
    """The streams by job, module and rank: peers that share a rank are one entry."""
    found: dict[tuple[str, str, int], Progress] = {}
    for stream in streams:
        key = (stream.job_id, stream.module, stream.rank)
        found[key] = _furthest_behind(found[key], stream) if key in found else stream
    return [found[key] for key in sorted(found)]


def _furthest_behind(one: Progress, other: Progress) -> Progress:
    return replace(
        one,
        sent_step=_earlier(one.sent_step, other.sent_step),
        step=_earlier(one.step, other.step),
        ready=min(one.ready, other.ready),
        preparing=min(one.preparing, other.preparing),
        unread_s=max(one.unread_s, other.unread_s),
        waited_s=max((s for s in (one.waited_s, other.waited_s) if s is not None), default=None),
    )


def _earlier(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else min(one, other)
