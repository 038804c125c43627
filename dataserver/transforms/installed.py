"""Transforms of packages that are installed beside DistTrain, found by their entry points; none is imported here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pydantic import ValidationError

from dataserver.planning.job.fields import InstalledTransform, TextError, describe, parse_json
from dataserver.transforms.errors import TransformError

GROUP: Final = "disttrain.transforms"
"""Groups of entry points are called so, followed by a dot and the kind."""
_NAMED: Final = re.compile(r"([^=:\s]+)=([^:\s]+)")


class Kind(StrEnum):
    """What a transform is given."""

    METADATA = "metadata"
    TEXT = "text"
    PIXELS = "pixels"


@dataclass(frozen=True, slots=True)
class Installed:
    """One transform of an installed package."""

    name: str
    version: str
    kind: Kind
    value: str
    """Where its function is: module:attribute."""

    def __str__(self) -> str:
        return f"{self.name}={self.version}"


def named_versions(flag: str, entries: tuple[str, ...]) -> dict[str, str]:
    """The versions in entries NAME=VERSION of a repeated flag, by name.

    Raises:
        ValueError: an entry is something else, or names a transform twice.
    """
    found: dict[str, str] = {}
    for entry in entries:
        match = _NAMED.fullmatch(entry)
        if match is None:
            raise ValueError(f"--{flag} {entry[:80]!r}: NAME=VERSION is required, such as tint=1.2.0")
        name, version = match.groups()
        if name in found:
            raise ValueError(f"--{flag} names {name!r} twice; give each name once")
        found[name] = version
    return found


def parse_transform(entry: str) -> InstalledTransform:
    """The transform in an entry NAME=VERSION or NAME=VERSION:OPTIONS of a flag, where OPTIONS are an object of JSON.

    Raises:
        ValueError: the entry is something else.
    """
    named, colon, options = entry.partition(":")
    ((name, version),) = named_versions("transform", (named,)).items()
    try:
        values = {"name": name, "version": version, "options": parse_json(options) if colon else None}
        return InstalledTransform.model_validate(values)
    except TextError as error:
        raise ValueError(f"--transform {entry[:80]!r}: its options are no JSON: {error}") from None
    except ValidationError as error:
        why = describe(error, values, InstalledTransform)
        raise ValueError(f"--transform {entry[:80]!r}: {why}") from None


def find_installed(named: Mapping[str, str]) -> dict[str, Installed]:
    """The installed transforms of these names and versions, by name.

    Raises:
        TransformError: there is none of that name, or another version, or several packages have one.
    """
    if not named:
        return {}
    from importlib.metadata import entry_points  # few servers need it

    found: dict[str, list[Installed]] = {}
    for kind in Kind:
        for entry in entry_points(group=f"{GROUP}.{kind}"):
            if entry.dist is not None:
                one = Installed(entry.name, entry.dist.version, kind, entry.value)
                found.setdefault(entry.name, []).append(one)
    return {name: _chosen(name, version, found) for name, version in named.items()}


def _chosen(name: str, version: str, found: Mapping[str, list[Installed]]) -> Installed:
    every = list(dict.fromkeys(found.get(name, ())))
    if not every:
        raise TransformError(
            f"no installed package has a transform {name!r}, there are {sorted(found)}: install the package that has "
            f"the entry point {name} in a group {GROUP}.{'|'.join(Kind)}, or correct the name"
        )
    if len(every) > 1:
        listed = ", ".join(f"{one} ({one.kind}, {one.value})" for one in every)
        raise TransformError(f"several transforms are called {name!r}: {listed}; uninstall or rename all but one")
    if every[0].version != version:
        raise TransformError(
            f"the transform {name!r} is installed in version {every[0].version}, and {version} is named: install that "
            "version of its package, or name the one that is here"
        )
    return every[0]
