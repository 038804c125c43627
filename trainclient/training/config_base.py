"""What the options of all commands share, and all parts of the configuration."""

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import tyro
from pydantic import BaseModel, ConfigDict

from dataserver.flags import one_line, parse

Given = TypeVar("Given")


class Options(BaseModel):
    """A part of the configuration; help texts are the docstrings of its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Put each help text on one line: where the source breaks a line, help would break it, too."""
        for field in cls.model_fields.values():
            field.description = field.description and one_line(field.description)


SAYS_ITSELF = tyro.conf.arg(help_behavior_hint="")
"""The help text says what holds without the flag."""
AS_WRITTEN: Final = (tyro.conf.EnumChoicesFromValues, tyro.conf.DisallowNone)
"""Choices are written as in files, and what is not given is left out, not None."""


def options_of(
    kind: type[Given], command: str, about: str, arguments: Sequence[str], default: Given | None = None
) -> Given:
    """The options of a command from its flags. Ends the process where help is asked for.

    Args:
        kind: of the options.
        command: its name.
        about: what help says of it.
        arguments: the flags.
        default: what holds where no flag is given.

    Raises:
        ValueError: the flags do not fit; says which, and where help is.
    """
    prog = f"trainclient {command}"
    others: dict[str, Any] = {} if default is None else {"default": default}
    found: Given = parse(
        lambda given: tyro.cli(kind, prog=prog, description=one_line(about), args=given, config=AS_WRITTEN, **others),
        arguments,
        prog,
    )
    return found
