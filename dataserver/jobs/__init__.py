"""Where input and output meet the planner: a job and open datasets in, plans out. Servers and the CLI use it alike."""

from dataserver.jobs.cache import JobCache
from dataserver.jobs.card import ColumnCard, DatasetCard, Drops, Histogram, dataset_card, own_key
from dataserver.jobs.catalog import Catalog, quarantine_digest
from dataserver.jobs.errors import (
    DatasetMismatchError,
    DatasetUnknownError,
    FillingError,
    StatisticsPendingError,
    TokenizerUnknownError,
)
from dataserver.jobs.filling import fill_job
from dataserver.jobs.histogram import Counted, size_histogram, sizes_data, thinned
from dataserver.jobs.long_chats import long_chat_findings
from dataserver.jobs.planner import JOB_CHARS, Fetch, JobPlanner
from dataserver.jobs.scheduler import FairScheduler, IsCancelled, WorkCancelledError, never_cancelled
from dataserver.jobs.shard_statistics import Rules
from dataserver.jobs.single_flight import SingleFlightCache
from dataserver.jobs.split_documents import split_findings
from dataserver.jobs.statistics_cache import index_statistics

__all__ = [
    "JOB_CHARS",
    "Catalog",
    "ColumnCard",
    "Counted",
    "DatasetCard",
    "DatasetMismatchError",
    "DatasetUnknownError",
    "Drops",
    "FairScheduler",
    "Fetch",
    "FillingError",
    "Histogram",
    "IsCancelled",
    "JobCache",
    "JobPlanner",
    "Rules",
    "SingleFlightCache",
    "StatisticsPendingError",
    "TokenizerUnknownError",
    "WorkCancelledError",
    "dataset_card",
    "fill_job",
    "index_statistics",
    "long_chat_findings",
    "never_cancelled",
    "own_key",
    "quarantine_digest",
    "size_histogram",
    "sizes_data",
    "split_findings",
    "thinned",
]
