"""How long the tests of this folder try inputs: `--fuzz-seconds`, 60 by default, hours if you like."""

from pathlib import Path

import pytest
from fuzz.mutation import Fuzzing

ROOM_S = 240.0
"""For what a test does before and after it tries inputs."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let pytest's own limit follow the option."""
    limit = pytest.mark.timeout(config.getoption("fuzz_seconds") + ROOM_S)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(limit)


@pytest.fixture
def fuzzing(request: pytest.FixtureRequest) -> Fuzzing:
    """Time and seed, as the options say. What fails is kept (`keep`), so no seed is needed to try it again."""
    return Fuzzing(request.config.getoption("fuzz_seconds"), request.config.getoption("fuzz_seed"))
