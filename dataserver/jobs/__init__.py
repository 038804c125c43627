"""Where input and output meet the planner: a job and open datasets in, plans out. Servers and the CLI use it alike."""

from dataserver.jobs.catalog import Catalog, quarantine_digest
from dataserver.jobs.errors import (
    DatasetMismatchError,
    DatasetUnknownError,
    FillingError,
    TokenizerUnknownError,
)
from dataserver.jobs.filling import fill_job
from dataserver.jobs.kept import Kept
from dataserver.jobs.once import OnceCache
from dataserver.jobs.planner import JobPlanner
from dataserver.jobs.turns import Turns, Unwanted, UnwantedError

__all__ = [
    "Catalog",
    "DatasetMismatchError",
    "DatasetUnknownError",
    "FillingError",
    "JobPlanner",
    "Kept",
    "OnceCache",
    "TokenizerUnknownError",
    "Turns",
    "Unwanted",
    "UnwantedError",
    "fill_job",
    "quarantine_digest",
]
