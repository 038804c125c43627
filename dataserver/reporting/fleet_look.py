"""What the servers of a fleet do: asked again and again."""

from collections.abc import Mapping
from typing import Final

import grpc
from disttrain.v1.admin_service_pb2 import GetMetricsRequest, GetMetricsResponse

from dataserver.reporting.fleet_calls import GET_METRICS, NO_SERVER, Reply, ask_all, why_silent
from dataserver.reporting.fleet_numbers import Answer, answered

ANSWER_S: Final = 2.0
"""Time that a server has to answer, its connection included."""


class Fleet:
    """Servers, and what each said last."""

    def __init__(self, channels: Mapping[str, grpc.Channel]) -> None:
        self.channels = channels
        self._last: dict[str, GetMetricsResponse] = {}

    def look(self) -> list[Answer]:
        """Ask all servers at once; takes no longer than one of them may take."""
        replies = ask_all(self.channels, GET_METRICS, GetMetricsRequest(), ANSWER_S)
        return [self._answer(reply) for reply in replies]

    def _answer(self, reply: Reply[GetMetricsResponse]) -> Answer:
        address, now = reply.address, reply.message
        if reply.error is not None:
            return Answer(address, problem=why_silent(reply.error))
        # Every server sends its uptime; bytes of other programs may happen to be readable.
        if now is None or not now.HasField("uptime"):
            return Answer(address, problem=NO_SERVER)
        answer = answered(address, now, self._last.get(address))
        self._last[address] = now
        return answer
