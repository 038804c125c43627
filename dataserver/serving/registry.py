"""The jobs that this server knows: in memory only, made once however many ask for them, and bounded in bytes."""

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from disttrain.v1 import data_service_pb2, errors_pb2

from dataserver.dataset import Dataset, LruCache
from dataserver.fleet.membership import Peers
from dataserver.jobs import Catalog, FairScheduler, Fetch, IsCancelled, JobCache, JobPlanner, SingleFlightCache
from dataserver.planning.job.identity import Job
from dataserver.serving.block_cache_config import job_remark
from dataserver.serving.config import ServerConfig
from dataserver.serving.errors import DataServiceError
from dataserver.serving.metrics import Metrics, Stage
from dataserver.transforms import Pixels

_log = logging.getLogger(__name__)

MAX_STEP_TIMES: Final = 1024
MAX_STEP_TIMES_BYTES: Final = 3 << 20
"""Most bytes of reports that are kept for a job, so that one message can list them."""
REPORT_OVERHEAD_BYTES: Final = 64
"""Bytes counted for the object that holds a report."""
PATIENCE_S: Final = 5.0
"""Time that a call waits for the statistics of a dataset; then its client asks other servers, or this one again. Those
of small datasets are computed in it, also where the cores are busy."""
JOBS_SHARE: Final = 1 / 4
"""Share of the memory for jobs that their specifications, axes and reported times may take. The rest is for tables
and plans."""


class StepTimesLog:
    """The newest step times that were reported for one job, bounded in number and bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: deque[bytes] = deque()
        """Encoded: a decoded report takes several times as much."""
        self._bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory that the reports take."""
        with self._lock:
            return self._bytes + REPORT_OVERHEAD_BYTES * len(self._reports)

    def add(self, times: data_service_pb2.StepTimes) -> None:
        """Keep a report, dropping the oldest."""
        report = times.SerializeToString()
        with self._lock:
            self._reports.append(report)
            self._bytes += len(report)
            while len(self._reports) > MAX_STEP_TIMES or self._bytes > MAX_STEP_TIMES_BYTES:
                self._bytes -= len(self._reports.popleft())

    def newest(self, step: int | None = None) -> list[data_service_pb2.StepTimes]:
        """The reports of a step, or of all, oldest first."""
        with self._lock:
            reports = tuple(self._reports)
        found = map(data_service_pb2.StepTimes.FromString, reports)
        return [report for report in found if step in (None, report.step)]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ServedJob:
    """A job with all that serving it takes."""

    job: Job
    datasets: tuple[Dataset, ...]
    planner: JobPlanner
    installed: Pixels
    """Applies the transforms of pixels that users installed."""
    times: StepTimesLog = field(default_factory=StepTimesLog)


class JobRegistry:
    """Jobs by id. The one used least recently is forgotten first, unless a stream has it; clients bring it again."""

    def __init__(
        self,
        catalog: Catalog,
        config: ServerConfig,
        metrics: Metrics,
        fetch: Fetch | None = None,
        peers: Peers | None = None,
    ) -> None:
        """Know no job yet.

        Args:
            catalog: what jobs are made of.
            config: of the server.
            metrics: told of plans.
            fetch: asks other servers for plans.
            peers: the other servers, if there may be any.
        """
        self._catalog = catalog
        self._config = config
        self._metrics = metrics
        self._fetch = fetch
        self._peers = peers
        budget = int(config.job_bytes * JOBS_SHARE)
        self._jobs = SingleFlightCache[str, ServedJob](budget, _memory)
        self._cache = JobCache(config.job_bytes - budget, config.cache_dir)
        self._scheduler = FairScheduler(waiting=lambda: metrics.waiting(Stage.PLANNING_QUEUE))

    @property
    def num_jobs(self) -> int:
        """Number of jobs that are known."""
        return len(self._jobs.values())

    def planners(self) -> list[JobPlanner]:
        """Those of all jobs that are known; looking at them makes none of them used."""
        return [served.planner for served in self._jobs.values()]

    def caches(self) -> dict[str, LruCache[Any] | SingleFlightCache[Any, Any]]:
        """What is cached, by kind; together it may take `job_bytes`."""
        cache = self._cache
        return {"jobs": self._jobs, "tables": cache.tables, "windows": cache.windows, "plans": cache.plans}

    def get_or_create(self, job: Job, visible: Catalog, cancelled: IsCancelled) -> ServedJob:
        """The job, made by the first caller while others that ask for the same one wait.

        Args:
            job: what to make.
            visible: what exists for the caller.
            cancelled: whether it no longer waits.

        Raises:
            DatasetUnknownError: a dataset of the job does not exist for the caller.
            StatisticsPendingError: statistics of a dataset are computed first, which goes on; ask again.
            WorkCancelledError: the caller no longer waits. The job is made all the same while another one does.
            Exception: the job does not fit this server's datasets; nothing is cached then.
        """
        for dataset in job.stream.datasets:
            visible.named_dataset(dataset.name)
        served = self._jobs.get(job.job_id, lambda all_left: self._make(job, all_left), cancelled)
        self._cache.forget_others(other.job for other in self._jobs.values())
        return served

    def get(self, job_id: str, visible: Catalog) -> ServedJob:
        """A job that is known, if all its datasets exist for the caller.

        Raises:
            DataServiceError: JOB_UNKNOWN.
        """
        served = self._jobs.find(job_id)
        if served is None or any(entry.name not in visible.datasets for entry in served.job.stream.datasets):
            raise DataServiceError(
                errors_pb2.ERROR_REASON_JOB_UNKNOWN,
                f"this server does not know job {job_id[:64]!r}; call GetOrCreateJob with its specification and repeat",
            )
        return served

    def report(self, served: ServedJob, times: data_service_pb2.StepTimes) -> None:
        """Keep reported times with their job."""
        served.times.add(times)
        self._jobs.put(served.job.job_id, served)  # it costs more now

    def _make(self, job: Job, cancelled: IsCancelled) -> ServedJob:
        datasets = self._catalog.find_datasets(job.stream)
        self._catalog.check_tokenizer(job.stream.tokenizer)
        self._catalog.transforms.check_pixels(job.stream)
        planner = JobPlanner(
            job, datasets, self._cache, self._scheduler, cancelled, self._metrics.planned, self._fetch, PATIENCE_S
        )
        known_peers = 0 if self._peers is None else self._peers.count()[1]
        remark = job_remark(self._config, job.stream, datasets, known_peers)
        for note in (*planner.notes, *([] if remark is None else [remark])):
            _log.warning("job %s, %s", job.job_id[:12], note)
        return ServedJob(job, datasets, planner, self._catalog.transforms.pixels)


def _memory(served: ServedJob) -> int:
    return served.planner.num_bytes + served.times.num_bytes
