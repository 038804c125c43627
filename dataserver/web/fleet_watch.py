"""Asks a fleet again and again in threads of its own, so that no page waits for a server."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import time
from typing import Final

from dataserver.cli.doctor import look
from dataserver.cli.fleet_checks import Seen
from dataserver.cli.fleet_numbers import STAGES, Answer, throughput, waited
from dataserver.cli.top import Fleet
from dataserver.security import Channels

CHECK_S: Final = 30.0
"""Between two looks at what servers are set up like."""
WAITS_S: Final = 5.0
"""Between two looks at what trainers reported."""
HISTORY: Final = 360
"""Looks that are remembered: twelve minutes at 2 s."""
_RECONNECT: Final = (("grpc.max_reconnect_backoff_ms", 2000), ("grpc.initial_reconnect_backoff_ms", 500))
"""A server that is back is seen within seconds; gRPC's own pauses grow to two minutes."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Look:
    """The fleet at one moment."""

    at: float
    """Seconds since 1970."""
    answers: Sequence[Answer]


@dataclass(frozen=True, slots=True)
class Point:
    """What is remembered of a look."""

    at: float
    images_s: float
    megabytes_s: float
    waits: tuple[float, ...]
    """Seconds by stage, in the order of `STAGES`, summed over the streams of all servers."""


@dataclass(frozen=True, slots=True)
class Check:
    """What servers said of themselves, as for `dataserver doctor`."""

    at: float
    seen: Sequence[Seen]
    silent: Mapping[str, tuple[str, str]]
    """Why others said nothing, and what to do about it."""


RankOfJob = tuple[str, str, int]
"""The first characters of the id of a job, a module, and a rank of it."""
Waits = Callable[[], Mapping[RankOfJob, float]]
"""Share of their last reported step for which ranks waited for data; nothing of those that reported none."""


class FleetWatch:
    """Watches until it is closed. Thread-safe."""

    def __init__(self, names: Sequence[str], channels: Channels, interval_s: float) -> None:
        self.names = tuple(names)
        self.interval_s = interval_s
        self._channels = channels
        self._lock = threading.Lock()
        self._look: Look | None = None
        self._check: Check | None = None
        self._points: deque[Point] = deque(maxlen=HISTORY)
        self._waits: Mapping[RankOfJob, float] = {}
        self._ended = threading.Event()

    def start(self, waits: Waits | None = None) -> None:
        """Begin to ask.

        Args:
            waits: asked for the waits of ranks; None where no job is known.

        Raises:
            SecurityError: a token would travel unencrypted to another machine.
        """
        for name in self.names:
            self._channels.open(name).close()
        for name, work in (("look", self._looking), ("check", self._checking)):
            threading.Thread(target=self._again, args=(work,), name=f"fleet-{name}", daemon=True).start()
        if waits is not None:
            work = partial(self._asking_for, waits)
            threading.Thread(target=self._again, args=(work,), name="fleet-waits", daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._ended.set()

    def newest(self) -> tuple[Look | None, Check | None, list[Point]]:
        """The newest look, the newest check, and what is remembered of the looks."""
        with self._lock:
            return self._look, self._check, list(self._points)

    def _again(self, work: Callable[[], None]) -> None:
        """Do it until all ends; a defect is logged, and the page goes on."""
        while not self._ended.is_set():
            try:
                work()
            except Exception:
                _log.exception("the fleet cannot be looked at")
                self._ended.wait(CHECK_S)

    def waits(self) -> Mapping[RankOfJob, float]:
        """The newest waits of ranks."""
        with self._lock:
            return self._waits

    def _asking_for(self, waits: Waits) -> None:
        while not self._ended.is_set():
            found = waits()
            with self._lock:
                self._waits = found
            self._ended.wait(WAITS_S)

    def _looking(self) -> None:
        while not self._ended.is_set():
            version = self._channels.version
            with ExitStack() as stack:
                opened = {n: stack.enter_context(self._channels.open(n, _RECONNECT)) for n in self.names}
                fleet = Fleet(opened)
                while not self._ended.is_set() and version == self._channels.version:
                    self._note(fleet.look())
                    self._ended.wait(self.interval_s)

    def _note(self, answers: Sequence[Answer]) -> None:
        now, waits = time(), dict.fromkeys(STAGES, 0.0)
        images = megabytes = 0.0
        for answer in answers:
            rates = None if answer.now is None else throughput(answer.now, answer.before)
            if answer.now is None or rates is None:
                continue
            images, megabytes = images + rates[0], megabytes + rates[1]
            for stage, seconds in waited(answer.now, answer.before).items():
                waits[stage] += seconds
        with self._lock:
            has_rates = self._look is not None
            self._look = Look(now, answers)
            if has_rates:  # the first look has nothing before it
                self._points.append(Point(now, images, megabytes, tuple(waits.values())))

    def _checking(self) -> None:
        while not self._ended.is_set():
            seen, silent = look(self.names, self._channels)
            with self._lock:
                self._check = Check(time(), seen, silent)
            self._ended.wait(CHECK_S)
