"""One address at which another server of the fleet may be."""

import threading
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

import grpc
from disttrain.v1.data_service_pb2 import GetOrCreateJobRequest
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from disttrain.v1.peer_service_pb2 import GreetRequest, GreetResponse
from disttrain.v1.peer_service_pb2_grpc import PeerServiceStub

from dataserver.fleet.peer_health import PeerHealth
from dataserver.planning.job.identity import Job
from dataserver.security import Channels

GREET_S: Final = 4.0
"""Time that a server has to answer Greet, its connection included. Its processor may be busy, so no less."""
BRING_S: Final = 1800.0
"""Time in which a server may make a job known: it sizes every sample of it first."""
MAX_PLAN_BYTES: Final = 32 << 20
"""Largest message of a plan; the largest step that `plan_version` takes needs half of it."""
INSTANCE_BYTES: Final = 16

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_PLAN_BYTES),
    # A server that stopped is noticed by its missing answers; these end the connection, so that it is made anew.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)


@dataclass(slots=True)
class _Bringing:
    """A job on its way to a peer."""

    call: "grpc.Future[Any]"
    since: float


class Peer:
    """What is known of one address. Thread-safe."""

    def __init__(self, address: str, health: PeerHealth, channels: Channels, server_name: str = "") -> None:
        """Make a peer that nobody has asked yet.

        Args:
            address: HOST:PORT.
            health: of all servers of the fleet.
            channels: opens the channel.
            server_name: the name in its certificate; empty where the address stands there.
        """
        self.address = address
        self.server_name = server_name
        self._health = health
        self._channel = channels.open(address, _OPTIONS, server_name)
        self.plans = PeerServiceStub(self._channel)
        self._jobs = DataServiceStub(self._channel)
        self._lock = threading.Lock()
        self._said: GreetResponse | None = None
        self.answered = False
        """Whether this peer ever answered."""
        self._bringing: dict[str, _Bringing] = {}

    @property
    def said(self) -> GreetResponse | None:
        """What it answered last; None while it does not answer."""
        return self._said

    def serves(self, job_id: str) -> bool:
        """Whether it may be asked for plans of a job at present."""
        said = self._said
        return said is not None and not said.draining and self._health.allows(said.instance, job_id)

    def greet(self) -> "grpc.Future[GreetResponse]":
        """Ask who is there; the call ends within `GREET_S`."""
        return self.plans.Greet.future(GreetRequest(), timeout=GREET_S)

    def hear(self, said: GreetResponse | None) -> None:
        """Keep what it answered, or that it does not answer."""
        with self._lock:
            self._said = said
            if said is not None:
                self.answered = True

    def set_aside(self, seconds: float, job_id: str = "") -> None:
        """Do not ask the process that answers there for a while; by default not for any job."""
        if (said := self._said) is not None:
            self._health.set_aside(said.instance, seconds, job_id)

    def distrust(self) -> None:
        """Ask the process that answers there for nothing any more."""
        if (said := self._said) is not None:
            self._health.distrust(said.instance)

    def bring(self, job: Job) -> "tuple[grpc.Future[Any], float]":
        """Make a job known there; one call however many ask for it. The call goes on when nobody waits for it.

        Returns:
            The call, and when it began on the monotonic clock.
        """
        with self._lock:
            found = self._bringing.get(job.job_id)
            if found is None or found.call.done():
                request = GetOrCreateJobRequest(job_spec_json=job.text)
                found = _Bringing(self._jobs.GetOrCreateJob.future(request, timeout=BRING_S), monotonic())
                self._bringing = {name: b for name, b in self._bringing.items() if not b.call.done()}
                self._bringing[job.job_id] = found
            return found.call, found.since

    def close(self) -> None:
        """Cancel all calls to this peer."""
        self._channel.close()
