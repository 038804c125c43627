"""A misbehaving server on loopback as HTTP server and as S3, for tests of what lies in stores."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from benchmarks.range_server import State, range_server

from dataserver.dataset.storage import index_mirror, registry
from dataserver.dataset.storage.blocks import BLOCKS, DEFAULT_MEMORY_BYTES
from dataserver.planning.kernels.cache import user_cache

SECRET = "secret-of-tests"
AWS = {"AWS_ACCESS_KEY_ID": "key-of-tests", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}


STORE_VARIABLES = ("AWS_", "AZUR", "GOOGLE_", "HF_", "DISTTRAIN_REDIRECT")
"""What the names of settings of stores begin with."""
START_S = 60.0
"""Time in which a server of another process begins to listen."""


def ask(url: str, method: str, data: bytes | None = None, headers: Mapping[str, str] | None = None) -> None:
    """Make a request, again while nobody listens yet."""
    until = time.monotonic() + START_S
    given = {"Content-Type": "application/octet-stream", **(headers or {})}
    while True:
        try:
            urlopen(Request(url, data, given, method=method), timeout=20).close()
        except URLError as error:
            if isinstance(error, HTTPError) or time.monotonic() > until:
                raise
            time.sleep(0.2)
        else:
            return


def forget_stores() -> None:
    """Let clients be made anew, with the environment as it is then, and hold no blocks."""
    index_mirror.index_root.cache_clear()
    for storage in registry.REMOTE.values():
        storage._stores.clear()
    BLOCKS.configure(DEFAULT_MEMORY_BYTES)
    BLOCKS.use_owners(None)
    BLOCKS.forget()


@pytest.fixture
def no_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An environment without settings of stores, and a cache of its own."""
    for name in [name for name in os.environ if name.startswith(STORE_VARIABLES)]:
        monkeypatch.delenv(name)
    if "NUMBA_CACHE_DIR" not in os.environ and (cache := user_cache()) is not None:
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(cache))  # kernels stay where they are compiled
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget_stores()
    yield
    forget_stores()


@pytest.fixture
def stores(no_stores: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[State, str]]:
    """The state of a misbehaving server, and its address, which the environment names as the endpoint of S3."""
    state = State()
    with range_server(state) as address:
        for name, value in {**AWS, "AWS_ENDPOINT_URL": address}.items():
            monkeypatch.setenv(name, value)
        yield state, address
