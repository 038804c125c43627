"""One server: its address, its channel, and the calls made on it."""

import os
import re
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import grpc
from disttrain.v1.data_service_pb2 import StreamMicrobatchesRequest
from disttrain.v1.data_service_pb2_grpc import DataServiceStub

from dataserver.addresses import MAX_ADDRESSES, expanded, is_loopback, split_address
from dataserver.security import Channels
from dataserver.tracing import Metadata
from trainclient.stream.errors import AddressError, ClientError, ClosedError, DeadlineError, service_error

Request = TypeVar("Request")
Response = TypeVar("Response")
if TYPE_CHECKING:  # gRPC's classes cannot be subscripted at run time
    Method = Callable[[DataServiceStub], grpc.UnaryUnaryMultiCallable[Request, Response]]

STREAM_METHOD = "/disttrain.v1.DataService/StreamMicrobatches"
PING_EVERY_MS = 2_000
"""While nothing comes; servers end connections that ping more often than once a second."""
PING_TIMEOUT_MS = 5_000

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long anything may take, in seconds."""

    connect: float = 5.0
    """Seconds until a server has taken a connection and said what it is; after it the next one is asked."""
    first_answer: float = 120.0
    """All tries together before any server ever answered: trainers may start before their servers."""
    call: float = 60.0
    """One unary call; planning a job's first step may take a while."""
    register: float = 1800.0
    """Making a job known, all tries together: servers may have to look at every sample first. The loss of a server is
    still noticed at once."""
    stall: float = 300.0
    """One microbatch, from the request for it to its last byte."""
    give_up: float = 120.0
    """All tries together after a server was lost, until the error is raised."""

    def __post_init__(self) -> None:
        for name in ("connect", "first_answer", "call", "register", "stall", "give_up"):
            if not 0 < getattr(self, name) <= 86400:
                raise ValueError(f"timeout {name} is {getattr(self, name)} s; a value in (0, 86400] is required")


def parse_addresses(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Addresses as `host:port`, from a sequence of them or one text with commas between; ranges are expanded.

    Raises:
        AddressError: naming the entry that is no address, or is listed twice.
    """
    try:
        entries = expanded(addresses)
    except ValueError as error:
        raise AddressError(str(error)) from None
    if not entries:
        raise AddressError(f"found no server address; 1 to {MAX_ADDRESSES} are required")
    for entry in entries:
        match = _ADDRESS.fullmatch(entry)
        if match is None or not 1 <= int(match["port"]) <= 65535:
            raise AddressError(
                f"found server address {entry!r}; HOST:PORT with a port from 1 to 65535 is required, "
                "as in 'data-0:50051,data-1:50051-50054' (IPv6 hosts in brackets)"
            )
        if entries.count(entry) > 1:
            raise AddressError(f"server address {entry!r} is there twice; name each server once")
    return entries


class Cancellable(Protocol):
    """A call in flight that can be ended."""

    def cancel(self) -> object:
        """End it; its owner sees the status CANCELLED."""


class MessageStream(Cancellable, Iterator[bytes], Protocol):
    """A stream of messages as they are on the wire; iterating raises grpc.RpcError when it fails."""

    def is_active(self) -> bool:
        """Whether the call goes on."""

    def code(self) -> grpc.StatusCode:
        """How the call ended; waits until it has."""


class CallGuard:
    """Lets one thread end what another one waits for: a call, or a pause between calls.

    Any thread that holds its lock may be the one whose collection drops a reader, and stops it: the lock is reentrant.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stopped = False
        self._call: Cancellable | None = None
        self._interrupted = False

    def hold(self, call: Cancellable) -> None:
        """Make a call the one to be ended; it replaces the one before.

        Raises:
            ClosedError: everything was stopped; the call is cancelled.
        """
        # An interrupt before this line was meant for the call before.
        with self._changed:
            self._call = call
            self._interrupted = False
            if not self._stopped:
                return
        call.cancel()
        raise ClosedError("the reader was closed")

    def interrupt(self) -> None:
        """End the call in hand; it fails as CANCELLED."""
        with self._changed:
            call = self._call
            self._interrupted = True
        if call is not None:  # without the lock; to cancel a call that has ended changes nothing
            call.cancel()

    def stop(self) -> None:
        """End the call in hand, every later one, and every pause."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self.interrupt()

    def cause(self) -> ClientError | None:
        """Why this side ended the call in hand; None if it did not."""
        with self._changed:
            if self._stopped:
                return ClosedError("the reader was closed")
            return DeadlineError("no data came for as long as allowed") if self._interrupted else None

    def pause(self, seconds: float) -> None:
        """Wait; ClosedError when stopped meanwhile, or at the end where this thread's own collection stopped it."""
        with self._changed:
            if not self._stopped:
                self._changed.wait(seconds)
            if self._stopped:
                raise ClosedError("the reader was closed")


class Endpoint:
    """One server. Channels are opened at the first call in each process: one inherited by fork does not work."""

    def __init__(self, address: str, timeouts: Timeouts, channels: Channels) -> None:
        self.address = address
        self._timeouts = timeouts
        self._opener = channels
        self._lock = threading.RLock()
        """Reentrant: a collection may close the fleet in the thread that holds it."""
        self._channels: dict[int, tuple[int, grpc.Channel]] = {}
        """By process, with the version of the certificates that it was opened with."""

    @property
    def is_local(self) -> bool:
        """Whether its address is one of the loopback device."""
        return is_loopback(split_address(self.address)[0])

    @property
    def tls(self) -> ssl.SSLContext | None:
        """TLS context for a connection beside gRPC's; None without encryption."""
        return self._opener.context

    def channel(self) -> grpc.Channel:
        """The channel of this process; a new one where its certificates have changed, while calls of the old go on.

        Raises:
            SecurityError: the credentials do not suit the address.
        """
        version = self._opener.version
        with self._lock:
            found = self._channels.get(os.getpid())
            if found is None or found[0] != version:
                found = version, self._opener.open(self.address, _channel_options(self._timeouts))
                self._channels[os.getpid()] = found
            return found[1]

    def unary(
        self, method: "Method[Request, Response]", request: Request, timeout: float, guard: CallGuard
    ) -> Response:
        """Make one attempt at a unary call.

        Raises:
            ClientError: it failed, or the guard was stopped.
        """
        call = method(DataServiceStub(self.channel())).future(request, timeout=timeout)
        guard.hold(call)
        try:
            return call.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            raise self.failure(error, guard) from None

    def stream(
        self, request: StreamMicrobatchesRequest, guard: CallGuard, metadata: Metadata | None = None
    ) -> MessageStream:
        """Open a stream of microbatches."""
        open_stream: grpc.UnaryStreamMultiCallable[StreamMicrobatchesRequest, bytes] = self.channel().unary_stream(
            STREAM_METHOD, request_serializer=StreamMicrobatchesRequest.SerializeToString, response_deserializer=None
        )
        call = open_stream(request, metadata=metadata)
        guard.hold(call)
        return call

    def failure(self, error: Exception, guard: CallGuard) -> ClientError:
        """The typed error of a call that ended, also where this side ended it."""
        cause = guard.cause()
        if cause is not None:
            return cause
        if isinstance(error, grpc.RpcError):
            return service_error(self.address, error)
        return DeadlineError(f"a call to server {self.address} was cancelled")

    def close(self) -> None:
        """Close this process's channel and with it all calls.

        When the interpreter ends, which closes generators that hold a client, gRPC's threads no longer run, and it
        would wait for them for ever; the system closes the connections then.
        """
        if sys.is_finalizing():
            return
        with self._lock:
            found = self._channels.pop(os.getpid(), None)
        if found is not None:
            found[1].close()


def _channel_options(timeouts: Timeouts) -> list[tuple[str, int]]:
    """gRPC options: a peer that vanished is noticed within 7 s, one that came back is tried again within 2 s.

    gRPC itself answers pings, in threads of its own: a server that computes, or a consumer that does not read, is not
    taken for lost.
    """
    return [
        ("grpc.keepalive_time_ms", PING_EVERY_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        # Pings that measure the bandwidth have this limit, a minute by default, and keepalive waits for them to end.
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # Without these two a lost server would not be tried again for up to two minutes, nor a dead one given up.
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", max(1, int(timeouts.connect * 1000))),
        # A channel of one's own: otherwise readers in one process share a connection and its flow control.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        # http_proxy is set on many clusters for the way out; data servers are inside.
        ("grpc.enable_http_proxy", 0),
    ]
