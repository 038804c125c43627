"""Kinds of values that specifications are made of."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, TypeGuard

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

MAX_INTEGER = 2**53 - 1
"""Largest integer that every JSON implementation carries exactly (RFC 8785, section 3.2.2.3)."""


_DECIMAL = r"^[0-9]{1,15}(\.[0-9]{1,15})?$"


def _decimal(text: str) -> str:
    """The shortest spelling of a decimal, so that equal fractions hash equally."""
    if not re.fullmatch(_DECIMAL[1:-1], text):
        raise ValueError(
            f"found {text[:64]!r}; a decimal string such as '0.97' is required: digits, with at most 15 before the "
            "point and 15 after it, no sign and no exponent"
        )
    whole, _, fraction = text.partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    return f"{whole}.{fraction}" if fraction else whole


def _integer_as_text(value: Any) -> Any:
    """The spelling of an integer, which may stand without quotes; anything else as it is."""
    return str(value) if type(value) is int else value


DecimalString = Annotated[
    str,
    BeforeValidator(_integer_as_text),
    AfterValidator(_decimal),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "pattern": _DECIMAL}, {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}]}
    ),
]
"""A fraction as text, or an integer; leading and trailing zeros do not count."""
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
_DIGEST = r"^[0-9a-f]{64}$"
_MAYBE_DIGEST = r"^([0-9a-f]{64})?$"
_VERSION = r"^[A-Za-z0-9][A-Za-z0-9._+!-]{0,63}$"
PATTERN_RULES: Final[Mapping[str, str]] = {
    _NAME: "a name is required: 1 to 128 ASCII letters, digits, '.', '_' and '-', the first one a letter or a digit",
    _DIGEST: "a digest is required: 64 hexadecimal digits, 0 to 9 and a to f",
    _VERSION: "the version of a package is required, such as 1.2.0: 1 to 64 ASCII letters, digits, and any of ._+!-",
    _MAYBE_DIGEST: "a digest is required, 64 hexadecimal digits, 0 to 9 and a to f, or an empty text for none",
}
"""What the patterns of texts ask for, in words."""
Name = Annotated[str, Field(pattern=_NAME)]
Version = Annotated[str, Field(pattern=_VERSION)]
Digest = Annotated[str, Field(pattern=_DIGEST)]
MaybeDigest = Annotated[str, Field(pattern=_MAYBE_DIGEST)]
Positive = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
Natural = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def is_name(value: Any) -> TypeGuard[str]:
    """Whether a job may call something by this value."""
    return isinstance(value, str) and re.fullmatch(_NAME[1:-1], value) is not None


class SpecModel(BaseModel):
    """Base of all parts of a specification: immutable, and keys that are unknown are refused.

    What is written below a field is read from the source only for the schema (`schema.py`): pydantic would do so
    whenever the module is imported, which takes longer than all else that it does. What validates a model is built
    when it is first used: that of the whole holds all of its parts, whose own are hardly ever wanted. So defaults are
    made without it (`model_construct`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class ModuleKind(StrEnum):
    """What a module computes."""

    ENCODER = "encoder"
    """Images to embeddings for the backbone."""
    BACKBONE = "backbone"
    """The language model that reads text and embeddings."""
    GENERATOR = "generator"
    """Images from conditions that the backbone gives."""
    TOWER = "tower"
    """One modality of contrastive training to features."""


class Modality(StrEnum):
    """What a tower or an encoder reads."""

    IMAGE = "image"
    TEXT = "text"
    AUDIO = "audio"
    VIDEO = "video"
