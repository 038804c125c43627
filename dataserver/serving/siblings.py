"""The other processes that serve the same address, as far as they are asked for what concerns all of them."""

import logging
from collections.abc import Callable, Sequence
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
    """Asks them all at once. One that does not answer is being started again, and has nothing to say."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._channels = [grpc.insecure_channel(address, _OPTIONS) for address in addresses]

    def ask(self, method: "Method[Request, Answer]", request: Request) -> list[Answer]:
        """What each of them answers."""
        calls = [method(AdminServiceStub(channel)).future(request, timeout=ANSWER_S) for channel in self._channels]
        return [answer for call in calls if (answer := _answer(call)) is not None]

    def close(self) -> None:
        """End all calls."""
        for channel in self._channels:
            channel.close()


def _answer(call: Any) -> Any:
    try:
        return call.result()
    except grpc.RpcError as error:
        _log.info("a process of this server does not answer: %s", error.details())
        return None


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
