"""Files that flags name for what a command writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Say which flag names a file that cannot be written.

    Raises:
        ValueError: the storage refused what was done meanwhile.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{flag} {path} cannot be written ({error.strerror or error}); name a file in a folder that exists and"
            " that you may write to, with room on its disk"
        ) from error
