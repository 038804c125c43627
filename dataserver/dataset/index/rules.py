"""The rules that decide which samples and texts an index has. They stand in its header and in the fingerprint."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

RULES_VERSION: Final = 1
"""Grows with every release that makes other samples or texts of the same bytes."""


class TextOnly(StrEnum):
    """What becomes of a text without an image, in a dataset that has images."""

    LEAVE_OUT = "leave-out"
    ALLOW = "allow"


class MetadataKeys(StrEnum):
    """How rows of a sidecar find their samples."""

    WHOLE = "whole"
    """Rows belong to the samples of the same key."""
    LAST_PART = "last-part"
    """Rows belong to the samples whose keys have the same last part, behind the last slash."""


@dataclass(frozen=True, slots=True)
class IndexRules:
    """What the user chooses when a dataset is indexed."""

    text_only: TextOnly = TextOnly.LEAVE_OUT
    metadata_keys: MetadataKeys = MetadataKeys.WHOLE
    allow_duplicates: bool = False
    """Whether shards with the same bytes are served several times. It changes no index of a shard."""


DEFAULT_RULES: Final = IndexRules()


class LoneTexts(StrEnum):
    """What was done with the texts without an image of one shard."""

    ALLOWED = "allowed"
    """They are samples, as the user asked for."""
    LEFT_OUT = "left-out"
    """They are findings: the dataset has images."""
    ALONE = "alone"
    """They are samples: no shard of the dataset has an image."""


def written_rules(lone_texts: LoneTexts, keys: MetadataKeys) -> str:
    """Return the rules as a header holds them."""
    return f"{RULES_VERSION} texts={lone_texts} metadata-keys={keys}"


def lone_texts_of(rules: IndexRules, has_images: bool) -> LoneTexts:
    """Return what becomes of lone texts in a dataset with or without images."""
    if rules.text_only is TextOnly.ALLOW:
        return LoneTexts.ALLOWED
    return LoneTexts.LEFT_OUT if has_images else LoneTexts.ALONE


def check_rules(written: str) -> None:
    """Raise ValueError if an index was made by the rules of another release."""
    version = written.partition(" ")[0]
    if version != str(RULES_VERSION):
        raise ValueError(f"it was made by rules {version[:20]!a} for samples, this program has rules {RULES_VERSION}")
