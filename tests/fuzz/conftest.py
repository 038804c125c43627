"""How long the tests of this folder try inputs: `--fuzz-seconds`, 1.5 by default, hours if you like."""

from pathlib import Path

import pytest
from fuzz.search import Search

ROOM_S = 600.0
"""For what a test does before and after it tries inputs; making one that fails small takes up to five minutes."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let pytest's own limit follow the option."""
    limit = pytest.mark.timeout(config.getoption("fuzz_seconds") + ROOM_S)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(limit)


@pytest.fixture
def search(request: pytest.FixtureRequest) -> Search:
    """Time and seed, as the options say."""
    option = request.config.getoption
    return Search(option("fuzz_seconds"), option("fuzz_seed"), option("fuzz_blob"))
