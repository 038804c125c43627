"""The other processes that serve the same address, as far as they are asked for what concerns all of them."""

import logging
import threading
from collections.abc import Callable, Sequence
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
_OPTIONS: Final = (("grpc.enable_http_proxy", 0),)

_log = logging.getLogger(__name__)


class Siblings:
    """Asks them all at once. Thread-safe."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._channels = {address: grpc.insecure_channel(address, _OPTIONS) for address in addresses}
        self._lock = threading.Lock()
        self._silent: set[str] = set()
        self._counted: dict[str, tuple[float, pb.GetMetricsResponse]] = {}
        """What each answered last, and when."""

    def drain(self, request: pb.DrainRequest) -> list[pb.DrainResponse]:
        """Tell all of them to drain. What those say that answer; one that is being started again has no stream."""
        return list(self._ask(lambda stub: stub.Drain, request).values())

    def metrics(self) -> list[pb.GetMetricsResponse]:
        """The numbers of each. For one that is late they are those of before: counters that fell would pass for new."""
        found = self._ask(lambda stub: stub.GetMetrics, pb.GetMetricsRequest(this_process=True))
        now = monotonic()
        with self._lock:
            self._counted |= {address: (now, answer) for address, answer in found.items()}
            return [_later(answer, now - since) for since, answer in self._counted.values()]

    def close(self) -> None:
        """End all calls."""
        for channel in self._channels.values():
            channel.close()

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


def _later(answer: pb.GetMetricsResponse, seconds: float) -> pb.GetMetricsResponse:
    """What a process counted, so much later."""
    later = pb.GetMetricsResponse()
    later.CopyFrom(answer)
    later.uptime.FromNanoseconds(answer.uptime.ToNanoseconds() + round(seconds * 1e9))
    return later


def summed(answers: Sequence[pb.GetMetricsResponse]) -> pb.GetMetricsResponse:
    """The numbers of several processes as those of one.

    All are sums, but for the time since the start: that of the youngest, since what the one before it had counted is
    gone from the sums.
    """
    whole = pb.GetMetricsResponse()
    for answer in answers:
        _add(whole, answer)
    whole.uptime.FromNanoseconds(min((a.uptime.ToNanoseconds() for a in answers), default=0))
    ranks = sorted(whole.ranks, key=lambda rank: (rank.job, rank.module, rank.rank))
    del whole.ranks[:]
    whole.ranks.extend(ranks)
    return whole


def _add(whole: Any, part: Any) -> None:
    """Add every number of a message to another one of its kind."""
    if isinstance(whole, Duration):
        whole.FromNanoseconds(whole.ToNanoseconds() + part.ToNanoseconds())
        return
    for field, value in part.ListFields():
        mine = getattr(whole, field.name)
        if field.message_type is None:
            setattr(whole, field.name, mine + value)
        elif field.name == "ranks":  # of one with streams at several processes there are several entries
            mine.extend(value)
        elif field.name == "plan_times":  # by the same bounds
            for i, entry in enumerate(value):
                if i == len(mine):
                    mine.add().CopyFrom(entry)
                else:
                    mine[i].plans += entry.plans
        else:
            _add(mine, value)
