"""Files of YAML or JSON that people write, such as jobs. The commands of both sides read them here."""

from collections.abc import Callable
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
        values = read_values("the job file", file, JobSpecError)
        return with_profiles(values, lambda name: read_values("the profile", file.parent / name, JobSpecError))
    except ProfileError as error:
        raise JobSpecError(f"the job file {file} cannot be used: {error}") from None


def read_values(what: str, file: Path, refusal: Callable[[str], Exception]) -> Any:
    """The values of a YAML or JSON file.

    Args:
        what: the file, for people.
        file: where it is.
        refusal: makes the error to raise of what is wrong: the file cannot be read, or is no YAML.
    """
    try:
        with file.open("rb") as stream:
            return parse_yaml(stream.read(MAX_TEXT_BYTES + 1))
    except OSError as error:
        raise refusal(f"{what} {file} cannot be read: {error.strerror or error}") from None
    except TextError as error:
        raise refusal(f"{what} {file} cannot be used: {error}") from None
