"""The files of jobs, as they are written."""

from pathlib import Path
from typing import Any

from dataserver.planning.costs.profile import ProfileError, with_profiles
from dataserver.planning.job.fields import MAX_TEXT_BYTES, TextError, parse_yaml


def read_job(file: Path) -> Any:
    """What a job's YAML or JSON file holds, with numbers where it names profiles that lie beside it.

    Raises:
        ValueError: it, or a profile, cannot be read or used, or is no YAML.
    """
    try:
        return with_profiles(_values("job", file), lambda name: _values("profile", file.parent / name))
    except ProfileError as error:
        raise ValueError(f"the job {file} cannot be used: {error}") from None


def _values(what: str, file: Path) -> Any:
    try:
        with file.open("rb") as stream:
            return parse_yaml(stream.read(MAX_TEXT_BYTES + 1))
    except OSError as error:
        raise ValueError(f"the {what} {file} cannot be read: {error.strerror}") from None
    except TextError as error:
        raise ValueError(f"the {what} {file} cannot be used: {error}") from None
