"""What can be odd in a dataset, by the word that `index`, `lint` and their users know it by."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Effect(StrEnum):
    """What becomes of what is odd."""

    LEFT_OUT = "left out"
    """The sample is not in the index: no job sees it."""
    SERVED = "served"
    """The sample is served, though not as its files may have been meant."""
    INVALID = "invalid"
    """The sample keeps its slot and is delivered as invalid."""
    IGNORED = "ignored"
    """Members, bytes or columns are not used. A sample that needs them is left out for a reason of its own."""


UNDECODABLE: Final = "undecodable"
LOST_IMAGE: Final = "lost_image"
NEEDS_SPECIAL_MEMBER: Final = "needs_special_member"
ODD_VALUES: Final = "odd_values"
UNUSABLE_COLUMN: Final = "unusable_column"

KINDS: Final[Mapping[str, Effect]] = {
    "bad_document": Effect.LEFT_OUT,
    "bad_json": Effect.LEFT_OUT,
    "corrupt_tar": Effect.LEFT_OUT,
    "cut_tar": Effect.LEFT_OUT,
    "duplicate_key": Effect.LEFT_OUT,
    "empty_document": Effect.LEFT_OUT,
    "image_too_large": Effect.LEFT_OUT,
    "missing_caption": Effect.LEFT_OUT,
    "missing_image": Effect.LEFT_OUT,
    NEEDS_SPECIAL_MEMBER: Effect.LEFT_OUT,
    "not_utf8": Effect.LEFT_OUT,
    "text_too_large": Effect.LEFT_OUT,
    "too_many_members": Effect.LEFT_OUT,
    "too_many_scalars": Effect.LEFT_OUT,
    "unreadable_header": Effect.LEFT_OUT,
    "duplicate_member": Effect.SERVED,
    "extra_image": Effect.SERVED,
    LOST_IMAGE: Effect.SERVED,
    UNDECODABLE: Effect.INVALID,
    "bad_sidecar": Effect.IGNORED,
    "extension_too_large": Effect.IGNORED,
    ODD_VALUES: Effect.IGNORED,
    "special_member": Effect.IGNORED,
    "too_many_columns": Effect.IGNORED,
    "trailing_data": Effect.IGNORED,
    UNUSABLE_COLUMN: Effect.IGNORED,
    "unsafe_name": Effect.IGNORED,
}
"""Every kind of finding; docs/datasets.md explains each."""
