"""Notes beside indexes: small files that are there whole or not at all, most of them a line of JSON."""

import json
from pathlib import Path
from typing import Any

from dataserver.dataset.index.format import atomic_writer
from dataserver.dataset.storage.etags import check_regular


def write_note(path: Path, content: bytes) -> None:
    """Write a note. Raises DatasetError where that is impossible."""
    with atomic_writer(path) as temp:
        temp.write_bytes(content)


def read_note(path: Path, max_bytes: int = -1) -> Any:
    """Return the JSON of a note, of no more than so many bytes. Raises OSError, ValueError or RecursionError."""
    check_regular(path)
    with path.open("rb") as file:
        return json.loads(file.read(max_bytes))
