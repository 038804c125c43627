"""The servers of a fleet as one: which to ask, where to go when it fails, and when to give up.

Any server answers any request with the same bytes, so failing over only means to ask the next one; what an error asks
for is its `action`. Before a server is used, and again after each of its failures, it is asked what it is: one whose
versions do not fit the job is passed over, and a fleet in which decoding libraries make other bytes than those of the
servers already used is refused.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc
from disttrain.v1.data_service_pb2 import GetOrCreateJobRequest, GetServerInfoRequest, GetServerInfoResponse
from disttrain.v1.errors_pb2 import (
    ERROR_ACTION_ANOTHER_SERVER,
    ERROR_ACTION_CREATE_JOB,
    ERROR_ACTION_GIVE_UP,
    ERROR_ACTION_RETRY,
)

from dataserver.planning.identity import Job, canonical_json
from trainclient.stream.endpoint import CallGuard, Endpoint, Request, Response, Timeouts, parse_addresses
from trainclient.stream.errors import (
    ClientError,
    DataServiceError,
    FleetError,
    ProtocolError,
    ServerMismatchError,
    VersionError,
)

if TYPE_CHECKING:
    from trainclient.stream.endpoint import Method

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class Fleet:
    """Servers by address. Thread-safe."""

    def __init__(self, addresses: str | Sequence[str], *, key: str = "", timeouts: Timeouts | None = None) -> None:
        """Parse the addresses; nothing is connected yet.

        Args:
            addresses: `host:port` entries, or one text with commas between them.
            key: decides the server to begin with, so that ranks spread over a fleet, and the jitter of pauses.
            timeouts: deadlines of all calls.

        Raises:
            AddressError: an address cannot be used.
        """
        self.addresses = parse_addresses(addresses)
        self.timeouts = timeouts or Timeouts()
        self.key = key
        self.endpoints = tuple(Endpoint(address, self.timeouts) for address in self.addresses)
        self.current = _word(key) % len(self.endpoints)
        """Position of the server that answered last. Set by any thread; a stale value costs one try."""
        self._lock = threading.Lock()
        """Guards the two below; never held during a call. Both may be read without it."""
        self._infos: dict[str, GetServerInfoResponse] = {}
        self._reference: tuple[str, str] | None = None

    @property
    def reached(self) -> bool:
        """Whether any server ever answered."""
        return self._reference is not None

    def attempt(self, action: Callable[[Endpoint], _Result], guard: CallGuard) -> _Result:
        """Do something at one server after the other until it succeeds.

        Raises:
            FleetError: no server could for as long as allowed.
            ClientError: an error that no other server would avoid.
        """
        rotation = Rotation(self, guard)
        while True:
            try:
                result = action(rotation.endpoint)
            except ClientError as error:
                rotation.failed(error)
            else:
                rotation.succeeded()
                return result

    def call(
        self,
        method: "Method[Request, Response]",
        request: Request,
        guard: CallGuard | None = None,
        job: Job | None = None,
    ) -> Response:
        """Make a unary call at whichever server answers, bringing it the job where it does not know it."""
        guard = guard or CallGuard()
        return self.attempt(lambda endpoint: self.ask(endpoint, method, request, guard, job), guard)

    def ask(
        self,
        endpoint: Endpoint,
        method: "Method[Request, Response]",
        request: Request,
        guard: CallGuard,
        job: Job | None = None,
    ) -> Response:
        """Make a unary call at one server, bringing it the job where it does not know it."""
        self.check(endpoint, guard, job)
        try:
            return endpoint.unary(method, request, self.timeouts.call, guard)
        except DataServiceError as error:
            if error.action != ERROR_ACTION_CREATE_JOB or job is None:
                raise
        self.bring(endpoint, job, guard)
        return endpoint.unary(method, request, self.timeouts.call, guard)

    def register(self, job: Job, guard: CallGuard | None = None) -> int:
        """Make the job known to a server; returns its number of steps."""
        guard = guard or CallGuard()
        return self.attempt(lambda endpoint: self.bring(endpoint, job, guard), guard)

    def bring(self, endpoint: Endpoint, job: Job, guard: CallGuard) -> int:
        """Make the job known to one server; returns its number of steps.

        Raises:
            ProtocolError: the server takes it for another job.
        """
        self.check(endpoint, guard, job)
        request = GetOrCreateJobRequest(job_spec_json=canonical_json(job.spec).decode())
        response = endpoint.unary(lambda stub: stub.GetOrCreateJob, request, self.timeouts.register, guard)
        if (response.job_id, response.stream_id) != (job.job_id, job.stream_id):
            raise ProtocolError(
                f"server {endpoint.address} names the job {response.job_id} (stream {response.stream_id}), this client "
                f"{job.job_id} (stream {job.stream_id}): install the same release on both"
            )
        return response.num_steps

    def check(self, endpoint: Endpoint, guard: CallGuard, job: Job | None = None) -> None:
        """Ask a server what it is, unless it said so since its last failure.

        Raises:
            ServerMismatchError: it would not serve the bytes that the servers used before serve.
            VersionError: it does not support the job's versions.
        """
        info = self._infos.get(endpoint.address)  # two threads may both find none and ask: either answer will do
        if info is None:
            info = endpoint.unary(lambda stub: stub.GetServerInfo, GetServerInfoRequest(), self.timeouts.connect, guard)
            self._compare(endpoint.address, info)
        if job is not None:
            _check_versions(endpoint.address, info, job)

    def forget(self, endpoint: Endpoint) -> None:
        """Have a server checked again before its next use: another one may listen there by then."""
        with self._lock:
            self._infos.pop(endpoint.address, None)

    def close(self) -> None:
        """Close all channels of this process."""
        for endpoint in self.endpoints:
            endpoint.close()

    def _compare(self, address: str, info: GetServerInfoResponse) -> None:
        with self._lock:
            if self._reference is None:
                self._reference = (address, info.content_digest)
            used, digest = self._reference
            if info.content_digest == digest:
                self._infos[address] = info
                return
        raise ServerMismatchError(
            f"servers {used} and {address} (release {info.release}) decode differently, content digests {digest} and "
            f"{info.content_digest}: install the same release with the same image libraries on all servers of a fleet"
        )


class Rotation:
    """One thread's way through the servers: the next one at once, a pause after each round, an end after a while.

    A server that refuses (action ANOTHER_SERVER) is set aside until another one makes progress; when all are, that is
    the end at once.
    """

    def __init__(self, fleet: Fleet, guard: CallGuard) -> None:
        self._fleet = fleet
        self._guard = guard
        self._position = fleet.current
        self._failures: dict[str, str] = {}
        self._began = time.monotonic()
        self._failing_since = 0.0
        self._refused: set[int] = set()
        """Positions of servers that are set aside."""
        self._tried: set[int] = set()
        """Positions of servers that were left in this round."""
        self._rounds = 0

    @property
    def endpoint(self) -> Endpoint:
        """The server to ask now."""
        return self._fleet.endpoints[self._position]

    def succeeded(self) -> None:
        """Note progress: everything before it is forgiven."""
        self._fleet.current = self._position
        self._failures.clear()
        self._refused.clear()
        self._tried.clear()
        self._rounds = 0

    def drained(self) -> None:
        """Move on from a server that shuts down in order; no failure, unless no server is left."""
        if len(self._tried | self._refused | {self._position}) == len(self._fleet.endpoints):
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
        now = time.monotonic()
        if not self._failures:
            self._failing_since = now
        address, text = self.endpoint.address, str(error)
        if self._failures.get(address) != text:  # once, however often it is tried
            _log.warning("%s; going to the next server", text)
        self._failures[address] = text
        if error.action == ERROR_ACTION_ANOTHER_SERVER:
            self._refused.add(self._position)
            if len(self._fleet.endpoints) == 1:
                raise error
            if len(self._refused) == len(self._fleet.endpoints):
                raise FleetError("no server can do this", self._failures) from None
        if self._fleet.reached:
            limit, since = self._fleet.timeouts.give_up, self._failing_since
        else:
            limit, since = self._fleet.timeouts.connect, self._began
        left = since + limit - now
        if left <= 0 and len(self._failures) == len(self._fleet.endpoints):
            raise self._given_up(limit) from None
        self._move()
        if self._position in self._tried:
            self._tried.clear()
            self._rounds += 1
            self._guard.pause(min(self._pause(self._rounds), max(left, 0.0)))

    def _move(self) -> None:
        """Go to the next server that is not set aside, which may be the same one."""
        self._fleet.forget(self.endpoint)
        self._tried.add(self._position)
        count = len(self._fleet.endpoints)
        following = ((self._position + i) % count for i in range(1, count + 1))
        self._position = next(position for position in following if position not in self._refused)

    def _pause(self, rounds: int) -> float:
        """Seconds before round `rounds`: doubling, with jitter that differs between ranks but not between runs."""
        longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(rounds, 16))
        return longest * (0.5 + _word(f"{self._fleet.key}/{rounds}") / 2**65)

    def _given_up(self, limit: float) -> FleetError:
        if self._fleet.reached:
            return FleetError(f"no server could go on for {limit:g} s", self._failures)
        return FleetError(
            f"no server could be reached for {limit:g} s; check the addresses, and that `dataserver serve` runs there",
            self._failures,
        )


def _word(key: str) -> int:
    """64 bits of a key's hash."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")


def _check_versions(address: str, info: GetServerInfoResponse, job: Job) -> None:
    stream, execution = job.spec.stream, job.spec.execution
    for name, wanted, supported in (
        ("order_version", stream.order_version, info.order_versions),
        ("content_version", stream.content_version, info.content_versions),
        ("plan_version", execution.plan_version, info.plan_versions),
    ):
        if wanted not in supported:
            raise VersionError(
                f"server {address} (release {info.release}) supports {name} {sorted(supported)}, the job is pinned to "
                f"{wanted}: run servers of the release that made the job, or start a new job"
            )
