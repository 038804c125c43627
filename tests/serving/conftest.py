"""Indexed shards, made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving.harness import TIMEOUT_S, Running, index, running
from shards import write_interleaved, write_pairs

from dataserver.serving import registry


@pytest.fixture(scope="session")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two indexed datasets; nobody changes them."""
    root = tmp_path_factory.mktemp("serving")
    return {
        "pairs": index(write_pairs(root / "pairs", 40, 16, seed=1)),
        "docs": index(write_interleaved(root / "docs", 24, 8, seed=2)),
    }


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Larger images, for microbatches of some MiB."""
    return index(write_pairs(tmp_path_factory.mktemp("photographs"), 32, 16, seed=3, median_size=400))


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, jobs are answered with what becomes of them, and not with how far they are."""
    monkeypatch.setattr(registry, "PATIENCE_S", float(TIMEOUT_S))


@pytest.fixture
def server(datasets: dict[str, Path]) -> Iterator[Running]:
    """A fresh server of both datasets."""
    with running(datasets) as found:
        yield found
