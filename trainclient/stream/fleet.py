"""The servers of a fleet as one.

Any server answers any request with the same bytes, so failing over only means to ask the next one; what an error asks
for is its `action`. Before a server is used, and again after each of its failures, it is asked what it is: one whose
versions do not fit the job, or whose decoding libraries make other bytes than those used so far, is passed over.
"""

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, TypeVar

from disttrain.v1.data_service_pb2 import (
    GetOrCreateJobRequest,
    GetOrCreateJobResponse,
    GetServerInfoRequest,
    GetServerInfoResponse,
)
from disttrain.v1.errors_pb2 import ERROR_ACTION_CREATE_JOB, ERROR_ACTION_GIVE_UP

from dataserver.planning.job.identity import Job, canonical_json
from dataserver.security import NO_CREDENTIALS, Channels, Credentials
from trainclient.stream.endpoint import CallGuard, Endpoint, Request, Response, Timeouts, parse_addresses
from trainclient.stream.errors import (
    ClientError,
    DataServiceError,
    ProtocolError,
    ServerMismatchError,
    VersionError,
)
from trainclient.stream.rotation import Rotation, word

if TYPE_CHECKING:
    from trainclient.stream.endpoint import Method

_REFUSALS: Final = frozenset({"JOB_INVALID", "JOB_UNSUPPORTED"})
_Result = TypeVar("_Result")


class Fleet:
    """Servers by address, as a `Rotation` goes through them. Thread-safe."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        key: str = "",
        timeouts: Timeouts | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        speaks: bool = True,
    ) -> None:
        """Parse the addresses; nothing is connected yet.

        Args:
            addresses: `host:port` entries, or one text with commas between them.
            key: decides the server to begin with, so that ranks spread over a fleet, and the jitter of pauses. Where
                addresses are of the loopback device, it is one of these.
            timeouts: deadlines of all calls.
            credentials: by what to know the servers, and what to show them.
            speaks: whether to say what concerns all ranks, for all of them: notes on the job, and every few
                seconds that no server answers.

        Raises:
            AddressError: an address cannot be used.
            SecurityError: nor can a file of the credentials.
        """
        self.addresses = parse_addresses(addresses)
        self.timeouts = timeouts or Timeouts()
        self.key = key
        self.speaks = speaks
        channels = Channels(credentials)
        self.endpoints = tuple(Endpoint(address, self.timeouts, channels) for address in self.addresses)
        # One on this machine, if the addresses name any: it shares memory instead of sending bytes.
        local = [i for i, endpoint in enumerate(self.endpoints) if endpoint.is_local] or range(len(self.endpoints))
        self.current = local[word(key) % len(local)]
        self.reached = False
        self.refusals: dict[str, str] = {}
        self.direct_fallbacks = 0
        """Streams that left their data connection for gRPC; the receiving thread counts."""
        self.avoid_direct: set[str] = set()
        """Addresses of servers from which the next stream is to come as chunks."""
        self._lock = threading.Lock()
        """Guards the three below; never held during a call. Both may be read without it."""
        self._infos: dict[str, GetServerInfoResponse] = {}
        self._reference: tuple[str, str] | None = None
        """The server whose bytes were used first, and its content digest."""
        self._media_references: dict[str, tuple[str, str]] = {}
        """The same of the first one that sent spectrograms (audio), or patches of videos (video), and its digest of
        these."""

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
        self.forget(endpoint)
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
            VersionError: it is of another release, which does not take the job.
        """
        self.check(endpoint, guard, job)
        response = self.create(endpoint, canonical_json(job.spec).decode(), guard)
        if (response.job_id, response.stream_id) != (job.job_id, job.stream_id):
            raise ProtocolError(
                f"server {endpoint.address} names the job {response.job_id} (stream {response.stream_id}), this client "
                f"{job.job_id} (stream {job.stream_id}): install the same release on both"
            )
        return response.num_steps

    def create(self, endpoint: Endpoint, text: str, guard: CallGuard) -> GetOrCreateJobResponse:
        """Ask one server to make a job known; `text` is the job as JSON.

        Raises:
            VersionError: it refuses the job, and is of another release than this one, whose servers may take it.
        """
        info = self.check(endpoint, guard)
        request = GetOrCreateJobRequest(job_spec_json=text)
        try:
            return endpoint.unary(lambda stub: stub.GetOrCreateJob, request, self.timeouts.register, guard)
        except DataServiceError as error:
            if error.reason not in _REFUSALS:
                raise
            if info.release == own_release():
                error.action = ERROR_ACTION_GIVE_UP  # all servers of this release say the same
                raise
            raise VersionError(
                f"server {endpoint.address} (release {info.release}) refuses the job, which servers of release "
                f"{own_release()} may take: {error.message}; run servers of the release that made the job, or leave "
                "out what is new"
            ) from None

    def check(self, endpoint: Endpoint, guard: CallGuard, job: Job | None = None) -> GetServerInfoResponse:
        """What a server is; it is asked, unless it said so since its last failure.

        Raises:
            ServerMismatchError: it would not serve the bytes that the servers used before serve.
            VersionError: it does not support the job's versions.
        """
        info = self._infos.get(endpoint.address)  # two threads may both find none and ask: either answer will do
        if info is None:
            info = endpoint.unary(lambda stub: stub.GetServerInfo, GetServerInfoRequest(), self.timeouts.connect, guard)
            self.reached = True
            with self._lock:
                self._infos[endpoint.address] = info
        if self._reference is not None:
            self.commit(endpoint, info)
        if job is not None:
            _check_versions(endpoint.address, info, job)
        return info

    def commit(self, endpoint: Endpoint, info: GetServerInfoResponse, of: str = "") -> None:
        """Note that a server's bytes are used: from now on all others have to decode like it.

        Only bytes commit, not answers: a server that is found to be odd before it sent any decides nothing. Where bytes
        are spectrograms (`of` is audio) or patches of videos (video), all have to make the same of these as well:
        spectrograms may be of the sound of videos. Those that have none are not asked.

        Raises:
            ServerMismatchError: other bytes were used before.
        """
        digests = {"audio": info.audio_digest, "video": info.video_digest, "sound": info.sound_digest}
        kinds = (of, "sound") if of == "audio" else (of,)
        used_media = {kind: (endpoint.address, digests[kind]) for kind in kinds if digests.get(kind)}
        with self._lock:
            images = self._reference or (endpoint.address, info.content_digest)
            used_media |= self._media_references
            compared = [("image", "content", info.content_digest, *images)]
            compared += [(kind, kind, digests[kind], *found) for kind, found in used_media.items() if digests[kind]]
            for libraries, kind, found, used, expected in compared:
                if found != expected:
                    raise ServerMismatchError(
                        f"servers {used} and {endpoint.address} decode differently, {kind} digests {expected} and"
                        f" {found}: install the same release with the same {libraries} libraries on all servers of a"
                        " fleet"
                    )
            self._reference, self._media_references = images, used_media  # one that is refused decides nothing

    def forget(self, endpoint: Endpoint) -> None:
        """Have a server checked again before its next use.

        It failed, or does not know the job that it was brought: another one may listen there by now.
        """
        with self._lock:
            self._infos.pop(endpoint.address, None)

    def close(self) -> None:
        """Close all channels of this process."""
        for endpoint in self.endpoints:
            endpoint.close()


@cache
def own_release() -> str:
    """The release of this client, as servers name theirs."""
    from importlib.metadata import version  # loads a parser of mail

    return version("disttrain")


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
