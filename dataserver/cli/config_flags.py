"""Flags of a command from the model of its configuration: every field is a flag, described where it is defined."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_origin

import tyro
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dataserver.cli.arguments import Entries, Pairs, Switch, named_paths, tokenizer_files
from dataserver.cli.parsing import docstring
from dataserver.flags import one_line
from dataserver.serving.budgets import MIB
from dataserver.serving.config import Metavar
from dataserver.transforms import named_versions

Configured = Callable[[Path | None, Mapping[str, Any]], None]
"""A command that gets its configuration file, and the fields that flags set."""


def with_flags(model: type[BaseModel]) -> Callable[[Configured], Callable[..., None]]:
    """Let a command take a flag for each field of a model, and a YAML file. It gets the file, and what flags set.

    A map is a flag in the singular that may be repeated, each time with NAME=PATH or what its `Metavar` says. A
    list is one flag, with commas. What is true by default has a flag `--no-...`.
    """
    fields = {_flag(name, field): (name, field) for name, field in model.model_fields.items()}

    def taking(command: Configured) -> Callable[..., None]:
        def taken(config: Path | None = None, **flags: Any) -> None:
            values = {name: _given(name, field, flags[flag]) for flag, (name, field) in fields.items()}
            command(config, {name: value for name, value in values.items() if value is not None})

        about = tyro.conf.arg(help="YAML file with the same settings. Flags override it.", help_behavior_hint="")
        kinds = {flag: _kind(field) for flag, (_, field) in fields.items()} | {"config": Annotated[Path | None, about]}
        unset = {flag: _unset(field) for flag, (_, field) in fields.items()} | {"config": None}
        taken.__doc__ = command.__doc__ or docstring(command)
        taken.__annotations__ = kinds
        parameters = [
            inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, default=unset[flag], annotation=kind)
            for flag, kind in kinds.items()
        ]
        taken.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return taken

    return taking


def _flag(name: str, field: FieldInfo) -> str:
    """The name of a field's flag, as a parameter."""
    return name.removesuffix("s") if get_origin(field.annotation) is dict else name


def _kind(field: FieldInfo) -> Any:
    """What a field's flag takes, and how help shows it."""
    origin = get_origin(field.annotation)
    limits = [getattr(limit, side) for side in ("ge", "le") for limit in field.metadata if hasattr(limit, side)]
    metavar = next((str(entry) for entry in field.metadata if isinstance(entry, Metavar)), None)
    if metavar is None and len(limits) == 2:
        metavar = f"{limits[0]}..{limits[1]}"
    about = None if field.description is None else one_line(field.description)
    shown = tyro.conf.arg(help=about, metavar=metavar, help_behavior_hint=_hint(field))
    if field.annotation is bool:
        return Annotated[Switch, shown]
    if origin is dict:
        return Annotated[Pairs, shown] if metavar is None else Annotated[Entries, shown]
    return Annotated[str | None if origin is tuple else field.annotation | None, shown]  # type: ignore[operator]


def _unset(field: FieldInfo) -> Any:
    """The value of a flag that is not given."""
    if field.annotation is bool:
        return field.default
    return () if get_origin(field.annotation) is dict else None


def _hint(field: FieldInfo) -> str:
    """What holds without the flag, where its description does not say it."""
    default = field.default
    if get_origin(field.annotation) is dict:
        return "(may be repeated)"
    if isinstance(default, bool) or not isinstance(default, int | str):
        return ""
    if isinstance(default, int) and default and default % MIB == 0:
        return f"(default: {default // MIB} MiB)"
    return f"(default: {default})"


def _given(name: str, field: FieldInfo, value: Any) -> Any:
    """The value that a flag gives a field; None where it was not given."""
    if field.annotation is bool:
        return None if value == field.default else value
    if value is None or value == ():
        return None
    if get_origin(field.annotation) is tuple:
        return tuple(entry.strip() for entry in value.split(",") if entry.strip())
    if name == "tokenizers":
        return tokenizer_files(value) or None
    if name == "transforms":
        return named_versions(_flag(name, field), value)
    if get_origin(field.annotation) is dict:
        return named_paths(_flag(name, field).replace("_", "-"), value)
    return value
