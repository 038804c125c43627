"""Packages with transforms, installed for the tests of a module."""

from collections.abc import Iterator

import pytest
from transforms.packages import install


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Everything in `packages` can be found and imported."""
    with pytest.MonkeyPatch.context() as patched:
        install(patched, tmp_path_factory.mktemp("packages"))
        yield
