"""Argument types that several commands share."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import tyro
from pydantic import BaseModel

from dataserver.cli.logs import LogFormat

if TYPE_CHECKING:
    from dataserver.planning.job.fields import Sizing

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SAYS_ITSELF = tyro.conf.arg(help_behavior_hint="")
"""The help text says what holds without the flag, and whether it may be repeated."""

Pairs = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=PATH", help_behavior_hint="")]
"""A flag that is given several times, each with NAME=PATH."""
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff, _SAYS_ITSELF]
"""A flag without a value."""
MaybePath = Annotated[Path | None, _SAYS_ITSELF]
MaybeLogFormat = Annotated[LogFormat | None, _SAYS_ITSELF]
MaybeInt = Annotated[int | None, _SAYS_ITSELF]
Address = Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT", help_behavior_hint="")]
Addresses = Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT,...", help_behavior_hint="")]

BYTES: Final = "bytes"
"""The built-in tokenizer, which --tokenizer may name without a file."""


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


def tokenizer_files(entries: Iterable[str]) -> dict[str, Path]:
    """The files that the entries of --tokenizer name; `bytes` alone is built in and has none.

    Raises:
        ValueError: as `named_paths`, or a file is called `bytes`.
    """
    found = named_paths("tokenizer", (entry for entry in entries if entry != BYTES))
    if BYTES in found:
        raise ValueError(f"--tokenizer {BYTES}={found[BYTES]}: {BYTES} is built in; give the file another name")
    return found


def sizing_of(**values: int | str) -> "Sizing":
    """The sizing that flags ask for, by the names that a job has for its fields.

    Raises:
        ValueError: a value is beyond what a job may have; says which, and what is required.
    """
    from pydantic import ValidationError

    from dataserver.planning.job.fields import Sizing, describe

    try:
        return Sizing.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ValueError(describe(error, values, Sizing)) from None


def given(**values: Any) -> dict[str, Any]:
    """The values that were given: neither None nor empty."""
    return {key: value for key, value in values.items() if value is not None and value != {}}


def with_ranges(model: type[BaseModel]) -> Callable[[_Function], _Function]:
    """Let the help of a command show the range of each flag that is a number with limits in a model."""

    def shown(function: _Function) -> _Function:
        for name in function.__annotations__.keys() & model.model_fields.keys():
            limits = model.model_fields[name].metadata
            ends = [getattr(limit, side) for side in ("ge", "le") for limit in limits if hasattr(limit, side)]
            if len(ends) == 2:
                range_ = tyro.conf.arg(metavar=f"{ends[0]}..{ends[1]}", help_behavior_hint="")
                function.__annotations__[name] = Annotated[int | None, range_]
        return function

    return shown
