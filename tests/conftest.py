"""Fixtures that every part of the suite uses."""

from pathlib import Path

import pytest
from hypothesis import settings

# No test asserts on time: machines are shared, and a first call may compile a kernel.
settings.register_profile("disttrain", deadline=None)
settings.load_profile("disttrain")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real photographs with captions that lies beside the checkout of a development machine."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    assert folder.is_dir(), f"{folder} is missing: these tests need the development data set beside the checkout"
    return folder
