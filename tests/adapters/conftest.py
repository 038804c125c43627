"""A server of pairs, one of them with a broken image, of documents, and of texts."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli.server_process import serving
from e2e.streams import dataset_flags
from loaders.installing import install, python_of
from serving.harness import index
from shards import break_images, write_interleaved, write_pairs, write_texts

BROKEN = 3
"""Row of the pair whose image cannot be decoded."""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    root = tmp_path_factory.mktemp("shards")
    folders = {
        "pairs": write_pairs(root / "pairs", num_samples=40),
        "docs": write_interleaved(root / "docs", num_samples=10),
        "texts": write_texts(root / "texts"),
    }
    for folder in folders.values():
        index(folder)
    break_images(folders["pairs"], (BROKEN, 0))
    index(folders["pairs"])
    with serving(*dataset_flags(folders)) as running:
        yield running.address


@pytest.fixture(scope="session")
def python_with(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """The interpreter of a framework's environment; skips where it is not installed and --install was not given."""

    def found(environment: str) -> Path:
        if request.config.getoption("--install"):
            install(environment)
        python = python_of(environment)
        if python is None:
            pytest.skip(f"the environment {environment} is not installed; --install does")
        return python

    return found
