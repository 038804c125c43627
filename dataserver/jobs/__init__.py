"""Where input and output meet the planner: a job and open datasets in, plans out. Servers and the CLI use it alike."""

from dataserver.jobs.catalog import Catalog, quarantine_digest
from dataserver.jobs.errors import (
    DatasetMismatchError,
    DatasetUnknownError,
    FillingError,
    StatisticsPendingError,
    TokenizerUnknownError,
)
from dataserver.jobs.filling import fill_job
from dataserver.jobs.histogram import size_histogram, thinned
from dataserver.jobs.kept import Kept
from dataserver.jobs.once import OnceCache
from dataserver.jobs.planner import Fetch, JobPlanner
from dataserver.jobs.shard_statistics import Rules
from dataserver.jobs.statistics_cache import index_statistics
from dataserver.jobs.turns import Turns, Unwanted, UnwantedError, always_wanted

__all__ = [
    "Catalog",
    "DatasetMismatchError",
    "DatasetUnknownError",
    "Fetch",
    "FillingError",
    "JobPlanner",
    "Kept",
    "OnceCache",
    "Rules",
    "StatisticsPendingError",
    "TokenizerUnknownError",
    "Turns",
    "Unwanted",
    "UnwantedError",
    "always_wanted",
    "fill_job",
    "index_statistics",
    "quarantine_digest",
    "size_histogram",
    "thinned",
]
