"""A misbehaving server on loopback as HTTP server and as S3, for tests of what lies in stores."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.range_server import State, range_server

from dataserver.dataset.storage import mirror, registry
from dataserver.dataset.storage.blocks import BLOCKS, DEFAULT_MEMORY_BYTES
from dataserver.planning.kernels.cache import user_cache

SECRET = "secret-of-tests"
AWS = {"AWS_ACCESS_KEY_ID": "key-of-tests", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}


def forget_stores() -> None:
    """Let clients be made anew, with the environment as it is then, and hold no blocks."""
    mirror.index_root.cache_clear()
    for storage in registry.REMOTE.values():
        storage._stores.clear()
    BLOCKS.configure(DEFAULT_MEMORY_BYTES)
    BLOCKS.use_owners(None)
    BLOCKS.forget()


@pytest.fixture
def no_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An environment without settings of stores, and a cache of its own."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "HF_", "DISTTRAIN_REDIRECT"))]:
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
