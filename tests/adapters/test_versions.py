"""Frameworks in releases that an adapter was not written for."""

from importlib.metadata import version

import pytest

from trainclient.adapters.versions import require


def test_supported_releases() -> None:
    found = version("numpy")
    major = int(found.split(".")[0])
    require("numpy", str(major), str(major + 1))
    require("numpy", found, str(major + 1))


@pytest.mark.parametrize(("first", "below"), [("9999", "10000"), ("0.1", "0.2.0"), ("0.1", version("numpy"))])
def test_other_releases_are_refused_with_those_that_would_do(first: str, below: str) -> None:
    with pytest.raises(ImportError, match=rf"found numpy .*from {first} to before {below}: pip install 'disttrain\["):
        require("numpy", first, below)


def test_a_framework_that_is_missing() -> None:
    with pytest.raises(ImportError, match=r"megatron-core-not is not installed.*pip install"):
        require("megatron-core-not", "1", "2")
