"""The files of jobs, as people write them. The commands of both sides read them here."""

from pathlib import Path
from typing import Any

from dataserver.planning.costs.profile import ProfileError, with_profiles
from dataserver.planning.job.fields import MAX_TEXT_BYTES, TextError, parse_yaml
from dataserver.planning.job.identity import JobSpecError


def read_job(file: Path) -> Any:
    """The values of a job's YAML or JSON file, not validated yet, with numbers where it names profiles beside it.

    Raises:
        JobSpecError: the file, or a profile, cannot be read or used, or is no YAML.
    """
    try:
        return with_profiles(_values("job file", file), lambda name: _values("profile", file.parent / name))
    except ProfileError as error:
        raise JobSpecError(f"the job file {file} cannot be used: {error}") from None


def _values(what: str, file: Path) -> Any:
    try:
        with file.open("rb") as stream:
            return parse_yaml(stream.read(MAX_TEXT_BYTES + 1))
    except OSError as error:
        raise JobSpecError(f"the {what} {file} cannot be read: {error.strerror or error}") from None
    except TextError as error:
        raise JobSpecError(f"the {what} {file} cannot be used: {error}") from None
