"""The jobs that this server knows: in memory only, made once however many ask for them, and bounded in number."""

import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from disttrain.v1 import data_service_pb2, errors_pb2

from dataserver.dataset import Dataset
from dataserver.jobs import Catalog, JobPlanner, Turns, table_cache
from dataserver.planning.identity import Job
from dataserver.preprocessing import Tokenizer
from dataserver.serving.errors import DataServiceError, service_error

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
        """Keep a report, dropping the oldest."""
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
        self._turns = Turns()

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
                    # Perhaps still being made: whoever waits has its future, and the next to ask makes it again.
                    self._jobs.popitem(last=False)
            self._jobs.move_to_end(job.job_id)
        if first:
            self._fulfil(future, job)
        try:
            return future.result(JOB_TIMEOUT_S)
        except TimeoutError:
            if future.done():  # settled just after the wait ended; the client is told to ask again (an OSError)
                raise
            raise DataServiceError(
                errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
                f"another call has been sizing the datasets of job {job.job_id} for {JOB_TIMEOUT_S:.0f} s; ask again",
            ) from None

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
            # Removed before it is settled, so that a settled future in `_jobs` never failed (`get`). After an eviction
            # the entry may be another caller's, which stays.
            with self._lock:
                if self._jobs.get(job.job_id) is future:
                    del self._jobs[job.job_id]
            future.set_exception(service_error(error))

    def _make(self, job: Job) -> ServedJob:
        datasets = self._catalog.find_datasets(job.stream)
        tokenizer = self._catalog.find_tokenizer(job.stream.tokenizer)
        return ServedJob(job, datasets, tokenizer, JobPlanner(job, datasets, self._tables, self._turns))
