"""Jobs as users write them, made complete by a server."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disttrain.v1.data_service_pb2 import GetOrCreateJobResponse

from dataserver.job_files import read_job
from dataserver.planning.job.fields import TextError, absent_fields, parse_json
from dataserver.planning.job.identity import Job, JobSpecError, identify, parse_job
from dataserver.planning.job.spec import JobSpec
from trainclient.stream.endpoint import CallGuard, Endpoint
from trainclient.stream.errors import DataServiceError, ProtocolError, VersionError
from trainclient.stream.fleet import Fleet

_log = logging.getLogger(__name__)

FAULTS_OF_THE_JOB = frozenset({"JOB_INVALID", "JOB_UNSUPPORTED", "DATASET_UNKNOWN", "TOKENIZER_UNKNOWN"})
"""Reasons of a refusal that only another job avoids."""

JobSource = Job | JobSpec | Mapping[str, Any] | str | Path


def load_job_data(source: JobSource) -> Job | dict[str, Any]:
    """The parsed form of a job, not validated yet.

    Args:
        source: a job, its specification, the same as a mapping, a JSON text (beginning with a brace), or the path of a
            YAML or JSON file.

    In a file, costs may name profiles that lie beside it; what comes back has their numbers.

    Raises:
        JobSpecError: it, or a profile, cannot be read or used.
    """
    if isinstance(source, Job):
        return source
    if isinstance(source, JobSpec):
        return identify(source)
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return _mapping(_json(source), "the text")
    return _mapping(read_job(Path(source)), str(source))


def resolve_job(source: JobSource, fleet: Fleet, guard: CallGuard | None = None) -> Job:
    """A validated job; a server fills in fingerprints, quarantines and the tokenizer where they are left out.

    Servers may differ in their quarantine lists. So one process of a run does this, and hands the job to all others.
    Ranks that do it each for themselves all ask the first address, and another one only where that does not answer.

    Raises:
        JobSpecError: the job cannot be read, is not valid, or names a dataset or tokenizer that the server lacks.
        ClientError: no server could be asked, or the server refuses the job for another reason.
    """
    data = load_job_data(source)
    if isinstance(data, Job):
        return data
    if not absent_fields(data):
        return parse_job(data)
    return _filled_in(data, fleet, guard or CallGuard())


def _filled_in(data: dict[str, Any], fleet: Fleet, guard: CallGuard) -> Job:
    try:
        text = json.dumps(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise JobSpecError(f"the job holds what JSON cannot say: {error}") from None

    def ask(endpoint: Endpoint) -> tuple[str, GetOrCreateJobResponse]:
        return endpoint.address, fleet.create(endpoint, text, guard)

    own, fleet.current = fleet.current, 0  # where all ranks begin, so that the same server fills in for all of them
    try:
        address, response = fleet.attempt(ask, guard)
    except DataServiceError as error:
        if error.reason not in FAULTS_OF_THE_JOB:
            raise
        raise JobSpecError(f"{error.message} (says server {error.server})") from None
    except VersionError as error:  # of the only server
        raise JobSpecError(str(error)) from None
    finally:
        fleet.current = own
    job = parse_job(_json(response.canonical_job_spec_json))
    if (response.job_id, response.stream_id) != (job.job_id, job.stream_id):
        raise ProtocolError(
            f"server {address} names the job that it filled in {response.job_id} (stream {response.stream_id}), this "
            f"client {job.job_id} (stream {job.stream_id}): install the same release on both"
        )
    for note in response.notes if fleet.speaks else ():
        _log.warning("%s (says server %s)", note, address)
    return job


def _json(text: str) -> Any:
    try:
        return parse_json(text)
    except TextError as error:
        raise JobSpecError(f"the job's text cannot be used: {error}") from None


def _mapping(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise JobSpecError(f"{where} holds {type(data).__name__}; a mapping with 'stream' and 'execution' is required")
    return data
