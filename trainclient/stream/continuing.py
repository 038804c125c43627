"""Which states a job goes on from: its own stream's at any step, and those of the stream that it continues at one."""

import json
from collections.abc import Mapping
from typing import Any

from dataserver.planning.job.identity import Job, differing_fields, hash_of
from trainclient.stream.errors import StateError


def check_stream(job: Job, state: Mapping[str, Any]) -> None:
    """Raise StateError unless a state (`ViewClient.state_dict`) is one that the job goes on from."""
    found, step = state.get("stream_id"), state.get("step")
    if found == job.stream_id:
        return
    earlier = job.stream.continues
    if earlier is None or all(found != hash_of(before.stream) for before in job.stream.earlier()):
        raise StateError(
            f"the checkpoint belongs to stream {found}, this job is stream {job.stream_id}; "
            f"it must hold the same samples in the same steps, but differs in {_differences(job, state)}: "
            "restore these fields of the job, or start without the checkpoint"
        )
    before = hash_of(earlier.stream)
    if (found, step) != (before, earlier.step):
        raise StateError(
            f"the checkpoint belongs to step {step} of stream {found}, and this job continues stream {before} from "
            f"step {earlier.step} on: resume from the checkpoint of that stream and step, or correct "
            "stream.continues.step"
        )


def stream_changes(job: Job, state: Mapping[str, Any]) -> list[str]:
    """Return what a job changes of the stream that it continues, if the state is that stream's; else nothing."""
    if job.stream.continues is None or state.get("stream_id") == job.stream_id:
        return []
    return [f"stream.{line}" for line in _lines(job, state) if not line.startswith("continues")]


def _differences(job: Job, state: Mapping[str, Any]) -> str:
    """The fields in which this job's stream and a state's differ, as text."""
    return "; ".join(_lines(job, state)) or "no field that this release knows"


def _lines(job: Job, state: Mapping[str, Any]) -> list[str]:
    try:
        theirs = json.loads(state.get("stream", ""))
    except (TypeError, ValueError):
        theirs = None
    if not isinstance(theirs, dict):
        return ["fields that the checkpoint does not tell"]
    return differing_fields(job.stream, theirs)
