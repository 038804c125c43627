"""The other processes that serve the same address, as far as they are asked for what concerns all of them."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
from disttrain.v1 import admin_service_pb2 as pb
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from google.protobuf.duration_pb2 import Duration

Request = TypeVar("Request")
Answer = TypeVar("Answer")
if TYPE_CHECKING:  # gRPC's classes cannot be subscripted at run time
    Method = Callable[[AdminServiceStub], grpc.UnaryUnaryMultiCallable[Request, Answer]]

ANSWER_S: Final = 1.0
"""Time that a sibling has to answer: who looks at a fleet waits two seconds."""
NO_COUNTERS: Final = (
    *("uptime", "open_streams", "ready_microbatches", "preparing_microbatches", "prefetch_used_bytes"),
    *("prefetch_limit_bytes", "known_jobs", "kept", "resident_bytes", "ranks"),
)
"""Fields of GetMetricsResponse that are of the moment; all others only grow."""
_OPTIONS: Final = (("grpc.enable_http_proxy", 0),)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sibling:
    """What is known of the processes that were, one after the other, at an address."""

    heard_at: float
    """When the last one answered, on the monotonic clock."""
    numbers: pb.GetMetricsResponse
    """What it answered."""
    ended: pb.GetMetricsResponse = field(default_factory=pb.GetMetricsResponse)
    """The counters of those before it."""
    not_counted: pb.GetMetricsResponse = field(default_factory=pb.GetMetricsResponse)
    """Those that it had when this process began."""

    def hear(self, numbers: pb.GetMetricsResponse, now: float) -> None:
        """Take what it answers; where a counter fell, or the time since its start, it is another process."""
        counters = _counters(self.numbers)
        if _less(numbers.uptime, self.numbers.uptime) or _less(numbers, counters):
            _add(self.ended, counters)
            _add(self.ended, self.not_counted, -1)
            self.not_counted.Clear()
        self.heard_at, self.numbers = now, numbers

    def at(self, now: float) -> pb.GetMetricsResponse:
        """Its numbers, with the counters of those before it."""
        found = pb.GetMetricsResponse()
        found.CopyFrom(self.numbers)
        _add(found, self.ended)
        _add(found, self.not_counted, -1)
        found.uptime.FromNanoseconds(found.uptime.ToNanoseconds() + round((now - self.heard_at) * 1e9))
        return found


class Siblings:
    """Asks them all at once. Thread-safe."""

    def __init__(self, addresses: Sequence[str], again: bool = False) -> None:
        """Find the siblings.

        Args:
            addresses: of each.
            again: whether a process like this one was there before, and ended. What the others count by then is in its
                sums, so that it is none of those of this process, which begin at zero as after any other start.
        """
        self._channels = {address: grpc.insecure_channel(address, _OPTIONS) for address in addresses}
        self._lock = threading.Lock()
        self._silent: set[str] = set()
        self._again = again
        self._asking = threading.Lock()
        """Held while numbers are asked for: of two answers at a time nobody knows which one is older. Guards the next
        two."""
        self._asked_at = float("-inf")
        self._known: dict[str, _Sibling] = {}
        """By address."""

    def drain(self, request: pb.DrainRequest) -> list[pb.DrainResponse]:
        """Tell all of them to drain. What those say that answer; one that is being started again has no stream."""
        return list(self._ask(lambda stub: stub.Drain, request).values())

    def metrics(self) -> list[pb.GetMetricsResponse]:
        """The numbers of each, with the counters of those that ended, and for one that is late those of before.

        Where a sum of counters fell, all that is left of it would pass for new.
        """
        came = monotonic()
        with self._asking:
            if self._asked_at < came:  # else another thread asked meanwhile
                self._asked_at = monotonic()
                self._hear(self._ask(lambda stub: stub.GetMetrics, pb.GetMetricsRequest(this_process=True)))
            now = monotonic()
            return [known.at(now) for known in self._known.values()]

    def close(self) -> None:
        """End all calls."""
        for channel in self._channels.values():
            channel.close()

    def _hear(self, answers: dict[str, pb.GetMetricsResponse]) -> None:
        now = monotonic()
        for address, answer in answers.items():
            if (known := self._known.get(address)) is not None:
                known.hear(answer, now)
            elif self._again:
                self._known[address] = _Sibling(now, answer, not_counted=_counters(answer))
            else:
                self._known[address] = _Sibling(now, answer)

    def _ask(self, method: "Method[Request, Answer]", request: Request) -> dict[str, Answer]:
        """What those say that answer in time, by address."""
        calls = {
            address: method(AdminServiceStub(channel)).future(request, timeout=ANSWER_S)
            for address, channel in self._channels.items()
        }
        found: dict[str, Answer] = {}
        for address, call in calls.items():
            try:
                found[address] = call.result()
            except grpc.RpcError as error:
                if self._is_news(address, silent=True):
                    _log.info("the process of this server at %s does not answer: %s", address, error.details())
            else:
                if self._is_news(address, silent=False):
                    _log.info("the process of this server at %s answers again", address)
        return found

    def _is_news(self, address: str, silent: bool) -> bool:
        """Note whether a process answers; whether it was otherwise before."""
        with self._lock:
            before = address in self._silent
            self._silent = self._silent | {address} if silent else self._silent - {address}
        return before != silent


def _counters(numbers: pb.GetMetricsResponse) -> pb.GetMetricsResponse:
    """What of the numbers only grows."""
    found = pb.GetMetricsResponse()
    found.CopyFrom(numbers)
    for name in NO_COUNTERS:
        found.ClearField(name)
    return found


def _less(now: Any, before: Any) -> bool:
    """Whether any number of a message is less than it was in another one of its kind."""
    if isinstance(before, Duration):
        return bool(now.ToNanoseconds() < before.ToNanoseconds())
    for found, value in before.ListFields():
        mine = getattr(now, found.name)
        if found.name == "plan_times":
            if len(mine) < len(value) or any(m.plans < v.plans for m, v in zip(mine, value, strict=False)):
                return True
        elif mine < value if found.message_type is None else _less(mine, value):
            return True
    return False


def summed(answers: Sequence[pb.GetMetricsResponse]) -> pb.GetMetricsResponse:
    """The numbers of several processes as those of one.

    All are sums, but for the time since the start, which is that of the youngest.
    """
    whole = pb.GetMetricsResponse()
    for answer in answers:
        _add(whole, answer)
    whole.uptime.FromNanoseconds(min((a.uptime.ToNanoseconds() for a in answers), default=0))
    ranks = sorted(whole.ranks, key=lambda rank: (rank.job, rank.module, rank.rank))
    del whole.ranks[:]
    whole.ranks.extend(ranks)
    return whole


def _add(whole: Any, part: Any, times: int = 1) -> None:
    """Add every number of a message, so many times, to another one of its kind."""
    if isinstance(whole, Duration):
        whole.FromNanoseconds(whole.ToNanoseconds() + times * part.ToNanoseconds())
        return
    for found, value in part.ListFields():
        mine = getattr(whole, found.name)
        if found.message_type is None:
            setattr(whole, found.name, mine + times * value)
        elif found.name == "ranks":  # of one with streams at several processes there are several entries
            mine.extend(value)
        elif found.name == "plan_times":  # by the same bounds
            for i, entry in enumerate(value):
                if i == len(mine):
                    mine.add().CopyFrom(entry)
                else:
                    mine[i].plans += times * entry.plans
        else:
            _add(mine, value, times)
