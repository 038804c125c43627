"""What all parts of the configuration share."""

import tyro
from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """A part of the configuration; help texts are the docstrings of its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


SAYS_ITSELF = tyro.conf.arg(help_behavior_hint="")
"""The help text says what holds without the flag."""
