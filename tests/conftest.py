"""Fixtures that every part of the suite uses."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real photographs with captions that lies beside the checkout of a development machine."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    assert folder.is_dir(), f"{folder} is missing: these tests need the development data set beside the checkout"
    return folder
