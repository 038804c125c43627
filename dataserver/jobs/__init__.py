"""Where input and output meet the planner: a job and open datasets in, plans out. Servers and the CLI use it alike."""

from dataserver.jobs.catalog import Catalog, quarantine_digest
from dataserver.jobs.errors import (
    DatasetMismatchError,
    DatasetUnknownError,
    FillingError,
    TokenizerUnknownError,
)
from dataserver.jobs.filling import fill_job
from dataserver.jobs.planner import JobPlanner
from dataserver.jobs.tables import table_cache
from dataserver.jobs.turns import Turns, Unwanted, UnwantedError

__all__ = [
    "Catalog",
    "DatasetMismatchError",
    "DatasetUnknownError",
    "FillingError",
    "JobPlanner",
    "TokenizerUnknownError",
    "Turns",
    "Unwanted",
    "UnwantedError",
    "fill_job",
    "quarantine_digest",
    "table_cache",
]
