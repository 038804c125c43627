"""Frameworks in releases that an adapter was not written for."""

from importlib.metadata import version

import pytest
from adapters.stubs import adapter_over

from trainclient.adapters.versions import require


def test_supported_releases() -> None:
    found = version("numpy")
    major = int(found.split(".")[0])
    require("numpy", str(major), str(major + 1))
    require("numpy", found, str(major + 1))


@pytest.mark.parametrize(("first", "below"), [("9999", "10000"), ("0.1", "0.2.0"), ("0.1", version("numpy"))])
def test_other_releases_are_refused_with_those_that_would_do(first: str, below: str) -> None:
    remedy = rf"pip install '\.\[numpy\]' 'numpy>={first},<{below}' in the checkout"
    with pytest.raises(ImportError, match=rf"found numpy .*from {first} to before {below}: {remedy}"):
        require("numpy", first, below)


@pytest.mark.parametrize(
    ("adapter", "package", "found", "supported"),
    [
        ("huggingface", "transformers", "4.57.1", "from 5 to before 6"),
        ("huggingface", "accelerate", "0.34.2", "from 1.1 to before 2"),
        ("lightning", "lightning", "1.9.5", "from 2.5 to before 3"),
        ("grain", "grain", "0.2.14", r"from 0\.2\.15 to before 0\.3"),
        ("torchtitan", "torchtitan", "0.2.2", r"from 0\.3 to before 0\.5"),
        ("megatron", "megatron-core", "0.15.3", r"from 0\.16 to before 0\.20"),
        ("megatron_bridge", "megatron-bridge", "0.5.0", r"from 0\.6 to before 0\.7"),
    ],
)
def test_every_adapter_refuses_a_release_that_it_was_not_written_for(
    monkeypatch: pytest.MonkeyPatch, adapter: str, package: str, found: str, supported: str
) -> None:
    with pytest.raises(ImportError, match=rf"found {package} {found}; .*{supported}: pip install"):
        adapter_over(monkeypatch, adapter, {package: found}, {})


def test_a_framework_that_is_missing() -> None:
    with pytest.raises(ImportError, match=r"megatron-core-not is not installed.*pip install"):
        require("megatron-core-not", "1", "2")
