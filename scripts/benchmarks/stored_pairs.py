"""Shards in a store, for benchmarks of servers: another process that answers each request after a delay, as S3."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.stored_rivals import store_of

URL: Final = "s3://bucket/shards"
DELAY_S: Final = 0.03
"""Of each request."""
CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}


@contextmanager
def in_a_store(folder: Path) -> Iterator[None]:
    """Serve the shards below a folder at `URL`, for this process and those that it starts."""
    with store_of(folder, DELAY_S) as store:
        given = {**CREDENTIALS, "AWS_ENDPOINT_URL": store.address}
        before = {name: os.environ.get(name) for name in given}
        os.environ.update(given)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
