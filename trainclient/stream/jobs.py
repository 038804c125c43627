"""Jobs as users write them, with what only the servers know filled in."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from disttrain.v1.data_service_pb2 import GetDatasetInfoRequest, GetDatasetInfoResponse, TokenizerInfo

from dataserver.planning.identity import Job, JobSpecError, identify, parse_job
from dataserver.planning.job import JobSpec
from trainclient.stream.endpoint import CallGuard
from trainclient.stream.fleet import Fleet

MAX_JOB_BYTES = 1 << 20
DEFAULT_TOKENIZER = "bytes"
SPECIAL_TOKENS = ("bos", "eos", "boi", "eoi", "image", "query")
"""Ids that follow the vocabulary, in this order, where a job names none."""
_TOKENIZER_FIELDS = {"digest", "vocab_size", *SPECIAL_TOKENS}

JobSource = Job | JobSpec | Mapping[str, Any] | str | Path


def load_job_data(source: JobSource) -> Job | dict[str, Any]:
    """The parsed form of a job, not validated yet.

    Args:
        source: a job, its specification, the same as a mapping, a JSON text (beginning with a brace), or the path of a
            YAML or JSON file.

    Raises:
        JobSpecError: it cannot be read.
    """
    if isinstance(source, Job):
        return source
    if isinstance(source, JobSpec):
        return identify(source)
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return _mapping(_json(source), "the text")
    return _mapping(_yaml(Path(source)), str(source))


def resolve_job(source: JobSource, fleet: Fleet, guard: CallGuard | None = None) -> Job:
    """A validated job, in which fingerprints, quarantines and the tokenizer are filled in where they are left out.

    What the job says stands; a server that has something else will refuse the job.

    Raises:
        JobSpecError: the job cannot be read, is not valid, or names a dataset or tokenizer that the fleet lacks.
        ClientError: the servers could not be asked.
    """
    data = load_job_data(source)
    if isinstance(data, Job):
        return data
    if _is_complete(data):
        return parse_job(data)
    return parse_job(fill_job(data, fleet.call(lambda stub: stub.GetDatasetInfo, GetDatasetInfoRequest(), guard)))


def fill_job(data: dict[str, Any], info: GetDatasetInfoResponse) -> dict[str, Any]:
    """A copy of a job's data with what it leaves out taken from what a server has.

    Raises:
        JobSpecError: it names a dataset or tokenizer that the server does not have.
    """
    stream = data.get("stream")
    if not isinstance(stream, dict):
        return data  # for parse_job to refuse
    filled = dict(stream)
    if isinstance(stream.get("datasets"), list):
        filled["datasets"] = [_filled_dataset(entry, info) for entry in stream["datasets"]]
    block = stream.get("tokenizer") or {}
    if isinstance(block, dict) and not block.keys() >= _TOKENIZER_FIELDS:
        filled["tokenizer"] = {**_tokenizer_block(block.get("name", DEFAULT_TOKENIZER), info), **block}
    return {**data, "stream": filled}


def _is_complete(data: dict[str, Any]) -> bool:
    """Whether the servers need not be asked: a `quarantine` that is left out is to be filled in, too."""
    stream = data.get("stream")
    if not isinstance(stream, dict) or not isinstance(stream.get("datasets"), list):
        return True
    tokenizer = stream.get("tokenizer")
    entries = [d for d in stream["datasets"] if isinstance(d, dict)]
    return (
        isinstance(tokenizer, dict)
        and tokenizer.keys() >= _TOKENIZER_FIELDS
        and all("fingerprint" in d and "quarantine" in d for d in entries)
    )


def _filled_dataset(entry: Any, info: GetDatasetInfoResponse) -> Any:
    if not isinstance(entry, dict) or "name" not in entry or {"fingerprint", "quarantine"} <= entry.keys():
        return entry
    known = {d.name: d for d in info.datasets}
    found = known.get(entry["name"])
    if found is None:
        raise JobSpecError(
            f"the job names dataset {entry['name']!r}; the servers have {sorted(known)}: correct the name, or start "
            f"the servers with --dataset {entry['name']}=PATH"
        )
    return {"fingerprint": found.fingerprint, "quarantine": found.quarantine, **entry}


def _tokenizer_block(name: Any, info: GetDatasetInfoResponse) -> dict[str, Any]:
    known: dict[str, TokenizerInfo] = {t.name: t for t in info.tokenizers}
    found = known.get(name)
    if found is None:
        raise JobSpecError(
            f"the job names tokenizer {name!r}; the servers have {sorted(known)}: correct the name, or start the "
            f"servers with --tokenizer {name}=FILE"
        )
    ids = {token: found.vocab_size + i for i, token in enumerate(SPECIAL_TOKENS)}
    vocab_size = found.vocab_size + len(SPECIAL_TOKENS)
    return {"name": found.name, "digest": found.digest, "vocab_size": vocab_size, **ids}


def _yaml(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_JOB_BYTES + 1)
    except OSError as error:
        raise JobSpecError(f"the job file {path} cannot be read: {error.strerror or error}") from None
    if len(text) > MAX_JOB_BYTES:
        raise JobSpecError(f"the job file {path} is larger than 1 MiB; is it a job?")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise JobSpecError(f"the job file {path} is not YAML: {' '.join(str(error).split())}") from None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise JobSpecError(f"the job's text is not JSON: {error}") from None


def _mapping(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise JobSpecError(f"{where} holds {type(data).__name__}; a mapping with 'stream' and 'execution' is required")
    return data
