"""Asks a fleet again and again in threads of its own, so that no page waits for a server."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic, time
from typing import Final

from disttrain.v1.admin_service_pb2 import ListFailuresResponse
from disttrain.v1.data_service_pb2 import DatasetInfo, GetDatasetInfoResponse

from dataserver.reporting.fleet_calls import FleetChannels, Servers
from dataserver.reporting.fleet_checks import Seen
from dataserver.reporting.fleet_look import Fleet
from dataserver.reporting.fleet_numbers import STAGES, Answer, throughput, waiting_at_a_time
from dataserver.reporting.fleet_setup import failures, look
from dataserver.web.rank_waits import RankOfJob, RankWaits

CHECK_S: Final = 30.0
"""Seconds between two looks at what servers are set up like."""
LOOKED_AT_S: Final = 60.0
"""Seconds after a request for which somebody is taken to look at the page."""
IDLE_S: Final = 0.5
"""After so long what rests sees that somebody looks again."""
AFTER_DEFECT_S: Final = 5.0
"""Least seconds before what failed is tried again."""
HISTORY: Final = 360
"""Looks that are remembered: twelve minutes at 2 s."""
_RECONNECT: Final = (("grpc.max_reconnect_backoff_ms", 2000), ("grpc.initial_reconnect_backoff_ms", 500))
"""A server that is back is seen within seconds; gRPC's own pauses grow to two minutes."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Look:
    """The fleet at one moment."""

    at: float
    """When the fleet was looked at, in seconds since 1970."""
    answers: Sequence[Answer]


@dataclass(frozen=True, slots=True)
class Point:
    """What is remembered of a look."""

    at: float
    images_s: float
    megabytes_s: float
    waiting: tuple[float, ...]
    """Streams that waited at a time, by stage, in the order of `STAGES`, of all servers."""


@dataclass(frozen=True, slots=True)
class Check:
    """What servers said of themselves, as for `dataserver doctor`."""

    at: float
    seen: Sequence[Seen]
    silent: Mapping[str, tuple[str, str]]
    """Why others said nothing, and what to do about it."""
    failed: Mapping[str, ListFailuresResponse] = field(default_factory=dict)
    """Samples and shards that failed lately, by server."""

    def dataset_names(self) -> set[str]:
        """The datasets that servers name."""
        listed = {dataset.name for one in self.seen for dataset in one.datasets.datasets}
        return listed | {failure.dataset for found in self.failed.values() for failure in found.failures}


def without(check: Check, hidden: Collection[str]) -> Check:
    """Return a check without what it says of some datasets."""
    if not hidden:
        return check
    seen = [
        replace(one, datasets=_of_datasets(one.datasets, [d for d in one.datasets.datasets if d.name not in hidden]))
        for one in check.seen
    ]
    failed = {
        server: ListFailuresResponse(failures=[f for f in found.failures if f.dataset not in hidden])
        for server, found in check.failed.items()
    }
    return replace(check, seen=seen, failed=failed)


def _of_datasets(said: GetDatasetInfoResponse, datasets: Sequence[DatasetInfo]) -> GetDatasetInfoResponse:
    found = GetDatasetInfoResponse()
    found.CopyFrom(said)
    found.ClearField("datasets")
    found.datasets.extend(datasets)
    return found


class FleetWatch:
    """Watches until it is closed. Thread-safe."""

    def __init__(self, servers: Servers, interval_s: float, *, rests: bool = False) -> None:
        """Watch servers from `start` on.

        Args:
            servers: that are watched.
            interval_s: between two looks at them.
            rests: whether they are asked only as long as somebody looks at the page.
        """
        self.servers = servers
        self.interval_s = interval_s
        self._rests = rests
        self._lock = threading.Lock()
        self._look: Look | None = None
        self._check: Check | None = None
        self._points: deque[Point] = deque(maxlen=HISTORY)
        self._waits: Mapping[RankOfJob, float] = {}
        self._defects: Mapping[str, str] = {}
        self._asked_at = float("-inf")
        self._ended = threading.Event()
        # Of the thread that looks, and of no other.
        self._opened = FleetChannels(servers, _RECONNECT)
        self._fleet: Fleet | None = None
        self._rank_waits = RankWaits()

    def start(self) -> None:
        """Begin to ask.

        Raises:
            SecurityError: a token would travel unencrypted to another machine.
        """
        for name in self.servers.names:
            self.servers.open(name).close()
        works: list[tuple[str, Callable[[], None], float]] = [
            ("the servers", self._look_once, self.interval_s),
            ("the setup of the servers", self._check_once, CHECK_S),
        ]
        for work in works:
            threading.Thread(target=self._again, args=work, name="fleet-watch", daemon=True).start()

    def close(self) -> None:
        """Stop asking servers how they are."""
        self._ended.set()

    def newest(self) -> tuple[Look | None, Check | None, list[Point]]:
        """The newest look, the newest check, and what is remembered of the looks."""
        with self._lock:
            self._asked_at = monotonic()
            return self._look, self._check, list(self._points)

    def waits(self) -> Mapping[RankOfJob, float]:
        """Share of the last time for which ranks waited for data; nothing of those whose clients do not report it."""
        with self._lock:
            return self._waits

    def defects(self) -> Mapping[str, str]:
        """What cannot be looked at at present, and why: a defect of this program, or a file that it cannot use."""
        with self._lock:
            return self._defects

    def _again(self, what: str, work: Callable[[], None], pause_s: float) -> None:
        """Do it until all ends; a defect is logged and shown, and the page goes on."""
        while not self._ended.is_set():
            if not self._is_wanted():
                self._ended.wait(IDLE_S)
                continue
            try:
                work()
            except Exception as error:
                _log.exception("%s cannot be looked at", what)
                found = {what: f"{type(error).__name__}: {error}"}
            else:
                found = {}
            with self._lock:
                if found or what in self._defects:  # another object where something changed, and there alone
                    self._defects = {**{w: why for w, why in self._defects.items() if w != what}, **found}
            self._ended.wait(max(pause_s, AFTER_DEFECT_S) if found else pause_s)

    def _is_wanted(self) -> bool:
        with self._lock:
            return not self._rests or monotonic() - self._asked_at < LOOKED_AT_S

    def _look_once(self) -> None:
        opened = self._opened.opened()
        if self._fleet is None or self._fleet.channels is not opened:
            self._fleet = Fleet(opened)
        self.note(self._fleet.look())

    def _check_once(self) -> None:
        seen, silent = look(self.servers)
        failed = failures(self.servers)
        with self._lock:
            self._check = Check(time(), seen, silent, failed)

    def note(self, answers: Sequence[Answer]) -> None:
        """Take over the answers of one look at the servers."""
        now, waiting = time(), dict.fromkeys(STAGES, 0.0)
        waits = self._rank_waits.note(answers)
        images = megabytes = 0.0
        for answer in answers:
            rates = None if answer.now is None else throughput(answer.now, answer.before)
            if answer.now is None or answer.before is None or rates is None:
                continue
            images, megabytes = images + rates[0], megabytes + rates[1]
            # Each server by its own clock: the first answer after a silence tells of all of it.
            for stage, streams in waiting_at_a_time(answer.now, answer.before).items():
                waiting[stage] += streams
        with self._lock:
            self._waits = waits
            has_rates = self._look is not None
            self._look = Look(now, answers)
            if has_rates:  # the first look has nothing before it
                self._points.append(Point(now, images, megabytes, tuple(waiting.values())))
