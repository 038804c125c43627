"""Kinds of values that specifications are made of."""

from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_INTEGER = 2**53 - 1
"""Largest integer that every JSON implementation carries exactly (RFC 8785, section 3.2.2.3)."""


def _decimal(text: str) -> str:
    """The shortest spelling of a non-negative decimal, so that equal fractions hash equally."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise ValueError(f"found {text!r}; a decimal string such as '0.97' is required") from None
    if not value.is_finite() or value.is_signed() or len(text) > 32 or abs(value.adjusted()) > 18:
        raise ValueError(f"found {text!r}; a decimal in [0, 10^18] with at most 32 characters is required")
    plain = format(value, "f")
    return (plain.rstrip("0").rstrip(".") if "." in plain else plain) or "0"


DecimalString = Annotated[str, AfterValidator(_decimal)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Positive = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
Natural = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class SpecModel(BaseModel):
    """Base of all parts of a specification: immutable, and keys that are unknown are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, use_attribute_docstrings=True)


class ModuleKind(StrEnum):
    """What a module computes."""

    ENCODER = "encoder"
    """Images to embeddings for the backbone."""
    BACKBONE = "backbone"
    """The LLM."""
    GENERATOR = "generator"
    """Images from conditions that the backbone gives."""
    TOWER = "tower"
    """One modality of contrastive training to features."""


class Modality(StrEnum):
    """What a tower reads."""

    IMAGE = "image"
    TEXT = "text"
