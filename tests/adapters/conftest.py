"""A server of pairs, one of them with a broken image, of documents, and of texts."""

from collections.abc import Iterator

import pytest
from cli.server_process import serving
from e2e.streams import dataset_flags
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
