"""The jobs that this server knows: in memory only, made once however many ask for them, and bounded in number."""

import json
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from disttrain.v1 import data_service_pb2, errors_pb2

from dataserver.dataset.cache import LruCache
from dataserver.dataset.dataset import Dataset
from dataserver.planning.identity import Job, JobSpecError, parse_job
from dataserver.planning.samples import ShardTable
from dataserver.preprocessing.tokens import Tokenizer
from dataserver.serving.catalog import Catalog
from dataserver.serving.errors import DataServiceError, service_error
from dataserver.serving.jobs import JobPlanner, table_cache

MAX_JOB_SPEC_BYTES: Final = 1 << 20
JOB_TIMEOUT_S: Final = 3600.0
"""Longest wait for another call that makes the same job: sizing a billion samples takes minutes."""
MAX_STEP_TIMES: Final = 1024
MAX_STEP_TIMES_BYTES: Final = 3 << 20
"""Of all reports kept for a job, so that one message can list them."""


class StepTimesLog:
    """The newest step times that were reported for one job, bounded in number and bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: deque[tuple[data_service_pb2.StepTimes, int]] = deque()
        self._bytes = 0

    def add(self, times: data_service_pb2.StepTimes) -> None:
        """Keep a report, letting the oldest go."""
        size = times.ByteSize()
        with self._lock:
            self._reports.append((times, size))
            self._bytes += size
            while len(self._reports) > MAX_STEP_TIMES or self._bytes > MAX_STEP_TIMES_BYTES:
                self._bytes -= self._reports.popleft()[1]

    def newest(self) -> list[data_service_pb2.StepTimes]:
        """The reports, oldest first."""
        with self._lock:
            return [times for times, _ in self._reports]


@dataclass(frozen=True, slots=True)
class ServedJob:
    """A job with all that serving it takes."""

    job: Job
    datasets: tuple[Dataset, ...]
    tokenizer: Tokenizer
    planner: JobPlanner
    times: StepTimesLog = field(default_factory=StepTimesLog)


class JobRegistry:
    """Jobs by id; the one used least recently is forgotten first, and its clients bring it again."""

    def __init__(self, catalog: Catalog, max_jobs: int) -> None:
        self._catalog = catalog
        self._max_jobs = max_jobs
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Future[ServedJob]] = OrderedDict()
        self._tables = table_cache()

    def get_or_create(self, job: Job) -> ServedJob:
        """The job, made by the first caller while others that ask for the same one wait.

        Raises:
            DataServiceError: the job does not fit this server's datasets; nothing is kept then.
        """
        with self._lock:
            future = self._jobs.get(job.job_id)
            first = future is None
            if future is None:
                future = self._jobs[job.job_id] = Future()
                if len(self._jobs) > self._max_jobs:
                    self._jobs.popitem(last=False)
            self._jobs.move_to_end(job.job_id)
        if first:
            self._fulfil(future, job)
        return future.result(JOB_TIMEOUT_S)

    def get(self, job_id: str) -> ServedJob:
        """A job that is known.

        Raises:
            DataServiceError: JOB_UNKNOWN.
        """
        with self._lock:
            future = self._jobs.get(job_id)
            if future is not None and future.done():
                self._jobs.move_to_end(job_id)
                return future.result()
        raise DataServiceError(
            errors_pb2.ERROR_REASON_JOB_UNKNOWN,
            f"this server does not know job {job_id[:64]!r}; call GetOrCreateJob with its specification and repeat",
        )

    def _fulfil(self, future: Future[ServedJob], job: Job) -> None:
        try:
            future.set_result(self._make(job))
        except Exception as error:
            with self._lock:
                if self._jobs.get(job.job_id) is future:
                    del self._jobs[job.job_id]
            future.set_exception(service_error(error))

    def _make(self, job: Job) -> ServedJob:
        datasets = self._catalog.find_datasets(job.stream)
        tokenizer = self._catalog.find_tokenizer(job.stream.tokenizer)
        return ServedJob(job, datasets, tokenizer, make_planner(job, datasets, self._tables))


def make_planner(job: Job, datasets: tuple[Dataset, ...], tables: LruCache[ShardTable] | None = None) -> JobPlanner:
    """The planner of a job; `tables` as in `JobPlanner`.

    Raises:
        DataServiceError: with the reason why the job cannot be planned over these datasets.
    """
    try:
        return JobPlanner(job, datasets, tables)
    except ValueError as error:
        known = service_error(JobSpecError(str(error))) if type(error) is ValueError else service_error(error)
        raise known from error


def parse_job_json(text: str) -> Job:
    """The job of a GetOrCreateJob request.

    Raises:
        DataServiceError: REQUEST_INVALID if it is too long, JOB_INVALID if it is no JSON.
        JobSpecError: naming the fields that are wrong.
    """
    size = len(text.encode())
    if size > MAX_JOB_SPEC_BYTES:
        raise DataServiceError(
            errors_pb2.ERROR_REASON_REQUEST_INVALID,
            f"job_spec_json has {size} bytes; at most {MAX_JOB_SPEC_BYTES} are allowed",
        )
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DataServiceError(
            errors_pb2.ERROR_REASON_JOB_INVALID, f"job_spec_json is not valid JSON: {error}"
        ) from None
    return parse_job(data)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})[:8]
        raise ValueError(f"an object names {twice} twice; every key may stand once")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
