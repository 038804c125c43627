"""Measured times that servers hold of a step, asked for once for all who want them."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

import grpc
from disttrain.v1.data_service_pb2 import ListStepTimesRequest, StepTimes

from dataserver.reporting.fleet_calls import LIST_STEP_TIMES, FleetChannels, Servers, ask_all, why_silent

ANSWER_S: Final = 5.0
ALL_S: Final = 10.0
"""Seconds that all servers together may take to answer."""
AT_ONCE: Final = 16
"""Servers that are asked at a time, since each may hold some MiB of reports."""
REMEMBERED_S: Final = 5.0
MAX_STEPS: Final = 8
"""Steps whose reports are remembered, those asked for last."""


@dataclass(frozen=True, slots=True)
class Found:
    """What all servers said of a step."""

    times: list[StepTimes] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    """Why servers said nothing, by address; those that have never heard of the job are no problem."""


class StepReports:
    """The reports of one fleet. Thread-safe: whoever asks while servers are asked waits for the same answers."""

    def __init__(self, servers: Servers) -> None:
        self._channels = FleetChannels(servers)
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[str, int], tuple[float, Found]] = OrderedDict()
        """By job and step, with the time of the answers on the monotonic clock."""

    def of_step(self, job_id: str, step: int) -> tuple[Sequence[StepTimes], Mapping[str, str]]:
        """The reports of a step, and why servers said nothing, by address."""
        with self._lock:
            at, found = self._found.pop((job_id, step), (float("-inf"), Found()))
            if monotonic() - at >= REMEMBERED_S:
                found = self._ask(job_id, step)
                at = monotonic()
            self._found[job_id, step] = at, found
            while len(self._found) > MAX_STEPS:
                self._found.popitem(last=False)
            return found.times, found.problems

    def close(self) -> None:
        """Close the connections to the servers."""
        self._channels.close()

    def _ask(self, job_id: str, step: int) -> Found:
        opened, end = list(self._channels.opened().items()), monotonic() + ALL_S
        found, request = Found(), ListStepTimesRequest(job_id=job_id, step=step)
        for first in range(0, len(opened), AT_ONCE):
            timeout_s = min(ANSWER_S, max(end - monotonic(), 0.1))
            for reply in ask_all(dict(opened[first : first + AT_ONCE]), LIST_STEP_TIMES, request, timeout_s):
                if reply.message is not None:
                    found.times.extend(_copies(reply.message.times, job_id, step))
                elif reply.error is not None and not _is_unknown(reply.error):
                    found.problems[reply.address] = why_silent(reply.error)
        return found


def _is_unknown(error: Exception) -> bool:
    """Whether a server has never heard of the job."""
    return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.NOT_FOUND


def _copies(times: Iterable[StepTimes], job_id: str, step: int) -> Iterator[StepTimes]:
    """The reports that are wanted: older servers send all, and a part of a message holds the memory of all of it."""
    for report in times:
        if (report.job_id, report.step) == (job_id, step):
            copy = StepTimes()
            copy.CopyFrom(report)
            yield copy
