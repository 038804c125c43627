"""`stream_id` and `job_id`: SHA-256 of canonical JSON (RFC 8785).

A field that a later version adds must be left out of the canonical form while it has its default value, or the ids of
running jobs would change under an upgrade; the golden hashes in the tests guard that.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

import rfc8785
from pydantic import ValidationError

from dataserver.planning.job.fields import (
    MODELS,
    SUPPORTED_CONTENT_VERSIONS,
    SUPPORTED_ORDER_VERSIONS,
    Stream,
    all_unknown,
    describe,
)
from dataserver.planning.job.limits import PlanLimitError, check_step
from dataserver.planning.job.spec import SUPPORTED_PLAN_VERSIONS, JobSpec

_MOST_CHARS: Final = 160
"""A longer value is cut in a message."""


class JobSpecError(ValueError):
    """A job specification that cannot be planned; the message names the fields."""


class UnknownFieldsError(JobSpecError):
    """A job that another release may take: all that is wrong are fields and choices that this one does not know."""


class UnsupportedVersionError(JobSpecError):
    """A job pinned to rules that this release does not have."""


@dataclass(frozen=True, slots=True)
class Job:
    """A validated specification with its identity."""

    spec: JobSpec
    job_id: str
    stream_id: str

    @property
    def stream(self) -> Stream:
        """The stream part of the specification."""
        return self.spec.stream

    @property
    def text(self) -> str:
        """The complete job as canonical JSON: what other processes and servers are given."""
        return canonical_json(self.spec).decode()


def canonical_json(spec: JobSpec | Stream) -> bytes:
    """RFC 8785 form of a specification, UTF-8; absent options are left out."""
    return rfc8785.dumps(spec.model_dump(mode="json", exclude_none=True))


def identify(spec: JobSpec) -> Job:
    """The job with the hashes that name it, 64 hexadecimal digits each."""
    return Job(spec, job_id=hash_of(spec), stream_id=hash_of(spec.stream))


def hash_of(spec: JobSpec | Stream) -> str:
    """The hash that names a job or a stream, 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(spec)).hexdigest()


def parse_job(data: Any) -> Job:
    """Validate a complete specification, given as the values of its JSON or YAML.

    Types are those of JSON, and none is converted: a number is no text, an integer has no fraction, true is no 1.

    Raises:
        JobSpecError: naming every field that is wrong, or the limit that steps of the job are beyond.
        UnknownFieldsError: naming the fields.
        UnsupportedVersionError: naming the version and the supported ones.
    """
    try:
        spec = JobSpec.model_validate_json(_json(data), strict=True)
    except ValidationError as error:
        kind = UnknownFieldsError if all_unknown(error, data) else JobSpecError
        raise kind(f"the job is not valid: {describe(error, data, JobSpec)}") from None
    streams = [*(before.stream for before in spec.stream.earlier()), spec.stream]
    for name, found, supported in (
        *(("order_version", stream.order_version, SUPPORTED_ORDER_VERSIONS) for stream in streams),
        ("content_version", spec.stream.content_version, SUPPORTED_CONTENT_VERSIONS),
        ("plan_version", spec.execution.plan_version, SUPPORTED_PLAN_VERSIONS),
    ):
        if found not in supported:
            raise UnsupportedVersionError(
                f"the job is pinned to {name} {found}; this release has {sorted(supported)}: "
                "run servers of the release that made the job, or start a new job"
            )
    try:
        check_step(spec)
    except PlanLimitError as error:
        raise JobSpecError(str(error)) from None
    _check_named(spec, data)
    return identify(spec)


def parse_stream(data: Any) -> Stream:
    """Validate the stream of a job alone, given as `parse_job` takes it; its versions are not looked at.

    Raises:
        JobSpecError: naming every field that is wrong.
    """
    try:
        return Stream.model_validate_json(_json(data), strict=True)
    except ValidationError as error:
        raise JobSpecError(f"the stream of the job is not valid: {describe(error, data, Stream)}") from None


def _check_named(spec: JobSpec, data: Any) -> None:
    """Ask the layout about the models that costs name: the specification has their times alone."""
    for module, given in zip(spec.execution.modules, data["execution"]["modules"], strict=True):
        name = (given.get("cost") or {}).get("model")
        if name is not None:
            try:
                spec.execution.layout.check_model(module, name, MODELS[module.kind][name])
            except ValueError as error:
                raise JobSpecError(f"the job is not valid: {error}") from None


def _json(data: Any) -> bytes:
    try:
        return json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        before = error.object[max(0, error.start - 40) : error.start]
        raise JobSpecError(f"the job is not valid: half a surrogate pair, no text, stands after {before!r}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise JobSpecError(f"the job is not valid: it holds what JSON cannot say: {error}") from None


def differing_fields(ours: Stream, theirs: dict[str, Any]) -> list[str]:
    """Paths at which a stream differs from another one's JSON form, for a refusal that tells what changed."""
    return _differences(ours.model_dump(mode="json", exclude_none=True), theirs, "")


def _differences(a: Any, b: Any, path: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(a.keys() | b.keys())
        return [p for k in keys for p in _differences(a.get(k), b.get(k), f"{path}.{k}" if path else k)]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [p for i, (x, y) in enumerate(zip(a, b, strict=True)) for p in _differences(x, y, f"{path}[{i}]")]
    return [] if a == b else [f"{path}: {_shown(a)} here, {_shown(b)} there"]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]} ..."
