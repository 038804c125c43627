"""Which server of a fleet to ask, where to go when it fails, and when to give up."""

import hashlib
import logging
import math
import time
from typing import Protocol

import grpc
from disttrain.v1.errors_pb2 import ERROR_ACTION_ANOTHER_SERVER, ERROR_ACTION_GIVE_UP, ERROR_ACTION_RETRY

from trainclient.stream.endpoint import CallGuard, Endpoint, Timeouts
from trainclient.stream.errors import ClientError, DataServiceError, FleetError

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
REPORT_EVERY_S = 5.0
"""While no server answers or goes on: by the first rank, which speaks for all."""
REPORT_LATE_S = 30.0
"""After which each of the others says it once: it may be alone with that."""

_STATISTICS_PENDING = "STATISTICS_PENDING"
"""Reason of servers that look at every sample of a dataset first: nothing is wrong with them."""

_log = logging.getLogger(__name__)


class Servers(Protocol):
    """What all rotations of a fleet share; each may be read and set by any thread."""

    endpoints: tuple[Endpoint, ...]
    timeouts: Timeouts
    key: str
    """Decides the jitter of pauses."""
    speaks: bool
    """Whether this is the rank that says again and again that no server answers, for all."""
    current: int
    """Position of the server that answered last. A stale value costs one try."""
    reached: bool
    """Whether any server ever answered."""
    refusals: dict[str, str]
    """Refusals by address: why a server that has not gone on since refused: others are asked before it."""

    def forget(self, endpoint: Endpoint) -> None:
        """Have a server checked again before its next use."""


class Rotation:
    """One thread's way through the servers: the next one at once, a pause after each round, an end after a while.

    A server that refuses (action ANOTHER_SERVER) is set aside until another one makes progress; when all are, that is
    the end at once. One that refused before comes last.
    """

    def __init__(self, fleet: Servers, guard: CallGuard) -> None:
        self._fleet = fleet
        self._guard = guard
        self._position = fleet.current
        self._failures: dict[str, str] = {}
        self._began = time.monotonic()
        self._failing_since = 0.0
        self._reported = self._began
        self._refused: set[int] = set()
        """Positions of servers that are set aside."""
        self._tried: set[int] = set()
        """Positions of servers that were left in this round."""
        self._drained: set[int] = set()
        """Positions of servers that shut down in order, since the last progress."""
        self._rounds = 0
        self._computing = False
        """Whether a server has to look at a dataset first, since the last progress."""

    @property
    def endpoint(self) -> Endpoint:
        """The server to ask now."""
        return self._fleet.endpoints[self._position]

    def succeeded(self) -> None:
        """Note progress: everything before it is forgiven."""
        self._fleet.current = self._position
        self._fleet.refusals.pop(self.endpoint.address, None)
        self._failures.clear()
        self._refused.clear()
        self._tried.clear()
        self._drained.clear()
        self._rounds = 0
        self._computing = False

    def drained(self) -> None:
        """Move on from a server that shuts down in order; no failure, unless it says so again or no server is left."""
        again = self._position in self._drained
        self._drained.add(self._position)
        if again or len(self._tried | self._refused | {self._position}) == len(self._fleet.endpoints):
            endpoint = self.endpoint
            text = "it is shutting down, and no other server took over"
            code = grpc.StatusCode.UNAVAILABLE
            self.failed(DataServiceError(endpoint.address, code, "DRAINING", text, ERROR_ACTION_RETRY))
        else:
            _log.info("server %s is shutting down, going to the next", self.endpoint.address)
            self._move()

    def failed(self, error: ClientError) -> None:
        """Move on after a failure, pausing after each round of all servers.

        Raises:
            ClientError: the error itself, if no other server would avoid it, or there is none.
            FleetError: all servers refused, or were tried for as long as allowed.
            ClosedError: the guard was stopped.
        """
        if error.action == ERROR_ACTION_GIVE_UP:
            raise error
        if not self._failures:
            self._failing_since = self._reported = time.monotonic()
        address, text = self.endpoint.address, str(error)
        refused = error.action == ERROR_ACTION_ANOTHER_SERVER
        known = (self._fleet.refusals if refused else self._failures).get(address)
        self._failures[address] = text
        if refused:
            self._fleet.refusals[address] = text
            self._refused.add(self._position)
            if len(self._fleet.endpoints) == 1:
                raise error
            if len(self._refused) == len(self._fleet.endpoints):
                raise FleetError("no server can do this", self._failures) from None
        computing = isinstance(error, DataServiceError) and error.reason == _STATISTICS_PENDING
        self._computing |= computing
        left = self._patience()
        # A refusal once, another failure once for each loss, and again by the first rank where the cause is another
        # one; servers may still be starting.
        if known is None or (known != text and not computing):
            is_told = self._fleet.reached and (known is None or self._fleet.speaks)
            level = logging.WARNING if refused or is_told else logging.INFO
            _log.log(level, "%s; going to the next server", text)
        self._move()
        if self._position in self._tried:
            self._tried.clear()
            self._rounds += 1
            self._guard.pause(min(self._pause(self._rounds), left))

    def _patience(self) -> float:
        """Seconds left until all tries together were enough.

        Raises:
            FleetError: none are.
        """
        reached, timeouts = self._fleet.reached, self._fleet.timeouts
        limit, since = (timeouts.give_up, self._failing_since) if reached else (timeouts.first_answer, self._began)
        limit = max(limit, timeouts.register) if self._computing else limit
        problem = "no server could go on" if reached else "no server could be reached"
        hint = "" if reached else "; check the addresses, and that `dataserver serve` runs there"
        now = time.monotonic()
        left = since + limit - now
        if left <= 0 and len(self._failures) == len(self._fleet.endpoints):
            raise FleetError(f"{problem} for {limit:g} s{hint}", self._failures) from None
        speaks = self._fleet.speaks
        if now - self._reported >= (REPORT_EVERY_S if speaks else REPORT_LATE_S):
            self._reported = now if speaks else math.inf
            _log.warning("%s", FleetError(f"{problem} for {now - since:.0f} s of {limit:g} s", self._failures))
        return max(left, 0.0)

    def _move(self) -> None:
        """Go to the next server that is not set aside, which may be the same one."""
        self._fleet.forget(self.endpoint)
        self._tried.add(self._position)
        count = len(self._fleet.endpoints)
        following = [(self._position + i) % count for i in range(1, count + 1)]
        left = [position for position in following if position not in self._refused]
        fresh = [position for position in left if position not in self._tried]
        refusals, endpoints = self._fleet.refusals, self._fleet.endpoints
        self._position = min(fresh or left, key=lambda position: endpoints[position].address in refusals)

    def _pause(self, rounds: int) -> float:
        """Seconds before round `rounds`: doubling, with jitter that differs between ranks but not between runs."""
        longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(rounds, 16))
        return longest * (0.5 + word(f"{self._fleet.key}/{rounds}") / 2**65)


def word(key: str) -> int:
    """64 bits of a key's hash."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
