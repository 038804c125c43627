"""Stores on loopback, and a folder of blocks."""

from pathlib import Path

import pytest
from stores import no_stores, stores

from dataserver.dataset.storage.block_files import BlockFiles

__all__ = ["no_stores", "stores"]


@pytest.fixture
def files(tmp_path: Path) -> BlockFiles:
    """Room for a GiB of blocks."""
    return BlockFiles(tmp_path / "blocks", 1 << 30)
