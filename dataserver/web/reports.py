"""Measured times that servers hold of a job, asked for once for all who want them."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

import grpc
from disttrain.v1.data_service_pb2 import ListStepTimesRequest, StepTimes

from dataserver.jobs import JOB_CHARS
from dataserver.reporting.fleet_calls import LIST_STEP_TIMES, FleetChannels, ask_all, why_silent
from dataserver.security import Channels

ANSWER_S: Final = 5.0
ALL_S: Final = 10.0
"""For all servers together."""
AT_ONCE: Final = 16
"""Servers that are asked at a time, since each may hold some MiB of reports."""
REMEMBERED_S: Final = 5.0
WANTED_S: Final = 60.0
"""For so long a step is looked for after somebody asked for it."""
MAX_STEPS: Final = 8
"""Steps whose reports are remembered, those asked for last."""

RankOfJob = tuple[str, str, int]
"""The first characters of the id of a job, a module, and a rank of it."""


@dataclass(frozen=True, slots=True)
class Found:
    """What all servers said at one moment."""

    job_id: str
    waits: dict[RankOfJob, float] = field(default_factory=dict)
    """Share of their last reported step for which ranks waited for data; of several stages the one that did most."""
    steps: dict[int, list[StepTimes]] = field(default_factory=dict)
    """The reports of the steps that were asked for."""
    problems: dict[str, str] = field(default_factory=dict)
    """Why servers said nothing, by address; those that have never heard of the job are no problem."""


class StepReports:
    """The reports of one fleet. Thread-safe: whoever asks while servers are asked waits for the same answers."""

    def __init__(self, names: Sequence[str], channels: Channels) -> None:
        self._channels = FleetChannels(names, channels)
        self._lock = threading.Lock()
        self._found = Found("")
        self._at = float("-inf")
        self._wanted: dict[int, float] = {}

    def waits(self, job_id: str) -> Mapping[RankOfJob, float]:
        """Share of their last reported step for which ranks waited for data."""
        return self._newest(job_id, None).waits

    def of_step(self, job_id: str, step: int) -> tuple[Sequence[StepTimes], Mapping[str, str]]:
        """The reports of a step, and why servers said nothing, by address."""
        found = self._newest(job_id, step)
        return found.steps.get(step, []), found.problems

    def close(self) -> None:
        """Close the connections."""
        self._channels.close()

    def _newest(self, job_id: str, step: int | None) -> Found:
        with self._lock:
            is_new = step is not None and step not in self._wanted
            if step is not None:
                self._wanted.pop(step, None)  # the steps stay in the order in which they were asked for last
                self._wanted[step] = monotonic()
            if is_new or self._found.job_id != job_id or monotonic() - self._at >= REMEMBERED_S:
                self._wanted = {
                    wanted: at for wanted, at in list(self._wanted.items())[-MAX_STEPS:] if monotonic() - at < WANTED_S
                }
                self._found = self._ask(job_id)
                self._at = monotonic()
            return self._found

    def _ask(self, job_id: str) -> Found:
        found, last = Found(job_id, steps={step: [] for step in self._wanted}), dict[RankOfJob, tuple[int, float]]()
        opened, end = list(self._channels.opened().items()), monotonic() + ALL_S
        for first in range(0, len(opened), AT_ONCE):
            timeout_s = min(ANSWER_S, max(end - monotonic(), 0.1))
            some = dict(opened[first : first + AT_ONCE])
            for reply in ask_all(some, LIST_STEP_TIMES, ListStepTimesRequest(job_id=job_id), timeout_s):
                if reply.message is not None:
                    _note(reply.message.times, found, last)
                elif reply.error is not None and not _is_unknown(reply.error):
                    found.problems[reply.address] = why_silent(reply.error)
        found.waits.update({key: share for key, (_, share) in last.items()})
        return found


def _is_unknown(error: Exception) -> bool:
    """Whether a server has never heard of the job."""
    return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.NOT_FOUND


def _note(times: Iterable[StepTimes], found: Found, last: dict[RankOfJob, tuple[int, float]]) -> None:
    """Take from an answer what is wanted of it, so that the rest of it can be forgotten."""
    for report in times:
        if report.job_id != found.job_id:
            continue
        if report.step in found.steps:
            copy = StepTimes()
            copy.CopyFrom(report)  # a part of a message holds the memory of all of it
            found.steps[report.step].append(copy)
        step_ns, wait_ns = (d.seconds * 10**9 + d.nanos for d in (report.step_time, report.data_wait))
        if step_ns > 0:
            key = report.job_id[:JOB_CHARS], report.module, report.rank
            last[key] = max(last.get(key, (0, 0.0)), (report.step, wait_ns / step_ns))
