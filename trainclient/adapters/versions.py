"""Which releases of a framework an adapter was written for and tested with."""

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from dataserver.extras import pip_install

_EXTRAS: Final = {
    "accelerate": "huggingface",
    "transformers": "huggingface",
    "megatron-core": "megatron",
    "megatron-bridge": "megatron",
}
"""The extra of each package whose extra has another name."""


def require(package: str, first: str, below: str) -> None:
    """Refuse other releases of a package than from `first` to before `below`, as in '2.5' and '3'.

    Raises:
        ImportError: it is not installed, or another release is.
    """
    extra = _EXTRAS.get(package, package)
    remedy = pip_install(extra, f"{package}>={first},<{below}")
    try:
        found = version(package)
    except PackageNotFoundError:
        raise ImportError(f"{package} is not installed; this adapter needs it: {remedy}") from None
    if not _numbers(first) <= _numbers(found) < _numbers(below):
        raise ImportError(
            f"found {package} {found}; this adapter supports releases from {first} to before {below}: {remedy}"
        )


def _numbers(release: str) -> tuple[int, ...]:
    """The release's leading numbers: (2, 6) of '2.6.0rc1', without zeros at the end."""
    found = re.match(r"\d+(?:\.\d+)*", release)
    numbers = [int(n) for n in found.group().split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
