"""What all parts of the configuration share."""

from typing import Any

import tyro
from pydantic import BaseModel, ConfigDict

from dataserver.flags import one_line


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
