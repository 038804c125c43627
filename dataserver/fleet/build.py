"""What code plans here: plans are fetched only from servers that have the same."""

import hashlib
from functools import cache
from pathlib import Path

import dataserver.planning


@cache
def build_id() -> str:
    """SHA-256 of the release and of every module that plans, or that plans depend on, 64 hexadecimal digits."""
    from importlib.metadata import version  # loads a parser of mail

    digest = hashlib.sha256(f"disttrain {version('disttrain')}\n".encode())
    folder = Path(dataserver.planning.__path__[0]).parent
    for file in sorted(file for name in ("dataset", "jobs", "planning") for file in (folder / name).rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
