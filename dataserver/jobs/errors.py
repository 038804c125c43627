"""Why a job cannot be planned over what there is. `serving/errors.py` gives each its reason."""

from dataserver.planning.job.identity import JobSpecError


class DatasetUnknownError(ValueError):
    """The job names a dataset that is not here."""


class DatasetMismatchError(ValueError):
    """A dataset of the job's name is here, with other shards or another quarantine list."""


class TokenizerUnknownError(ValueError):
    """The job names a tokenizer that is not here."""


class FillingError(JobSpecError):
    """What an incomplete job states is at odds with what would be filled in, or leaves several choices."""


class StatisticsPendingError(Exception):
    """Statistics of a dataset are computed for a job, which takes a while; the message says how far it is."""
