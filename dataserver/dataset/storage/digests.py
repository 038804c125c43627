"""Digests of whole files, on any backend."""

import hashlib
from pathlib import PurePath

from dataserver.dataset.storage.registry import storage_of


def digest_file(path: PurePath) -> str:
    """Return the SHA-256 of a regular file's content, hex. Raises OSError."""
    with storage_of(path).open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
