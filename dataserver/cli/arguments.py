"""Argument types that several commands share."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import tyro

Pairs = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=PATH")]
"""A flag that is given several times, each with NAME=PATH."""


def named_paths(flag: str, entries: Iterable[str]) -> dict[str, Path]:
    """The NAME=PATH entries of a repeated flag.

    Raises:
        ValueError: an entry has no name or no path, or a name stands twice.
    """
    found: dict[str, Path] = {}
    for entry in entries:
        name, separator, path = entry.partition("=")
        if not (separator and name and path):
            raise ValueError(f"--{flag} {entry}: NAME=PATH is required")
        if name in found:
            raise ValueError(f"--{flag} names {name!r} twice; give each name once")
        found[name] = Path(path)
    return found


def given(**values: Any) -> dict[str, Any]:
    """The values that were given: neither None nor empty."""
    return {key: value for key, value in values.items() if value is not None and value != {}}
