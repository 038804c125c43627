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


BAD_CONVERSATION: Final = "bad_conversation"
CHAT_ERROR: Final = "chat_error"
CUT_CHAT: Final = "cut_conversation"
LONG_CHAT: Final = "long_conversation"
CHAT_LEFT_OUT: Final = "chat_left_out"
CHAT_NOT_ENDED: Final = "chat_not_ended"
UNDECODABLE: Final = "undecodable"
DROPPED_IMAGE: Final = "dropped_image"
LOST_IMAGE: Final = "lost_image"
BAD_JSON: Final = "bad_json"
CORRUPT_PARQUET: Final = "corrupt_parquet"
NEEDS_CONVERT: Final = "needs_convert"
DUPLICATE_KEY: Final = "duplicate_key"
DUPLICATE_MEMBER: Final = "duplicate_member"
DUPLICATE_SHARD: Final = "duplicate_shard"
FAILED_DOWNLOAD: Final = "failed_download"
MISSING_CAPTION: Final = "missing_caption"
MISSING_NAMED_CAPTION: Final = "missing_named_caption"
MISSING_PARTNER: Final = "missing_partner"
MISSING_SIDECAR: Final = "missing_sidecar"
ORPHAN_TEXT: Final = "orphan_text"
SPLIT_DOCUMENT: Final = "split_document"
ROW_WITHOUT_SAMPLE: Final = "row_without_sample"
SAMPLE_WITHOUT_ROW: Final = "sample_without_row"
UNENCODABLE: Final = "token_error"
TEXT_TRANSFORM: Final = "text_transform"
TRANSFORM: Final = "transform"
TOO_MANY_SCALARS: Final = "too_many_scalars"
TRUNCATED_IMAGE: Final = "truncated_image"
UNREAD_FILE: Final = "unread_file"
UNUSED_PART: Final = "unused_part"
UNUSED_AUDIO: Final = "unused_audio"
UNUSED_VIDEO: Final = "unused_video"
LONG_AUDIO: Final = "long_audio"
NEEDS_SPECIAL_MEMBER: Final = "needs_special_member"
ODD_VALUES: Final = "odd_values"
UNUSABLE_COLUMN: Final = "unusable_column"

KINDS: Final[Mapping[str, Effect]] = {
    BAD_CONVERSATION: Effect.LEFT_OUT,
    "bad_document": Effect.LEFT_OUT,
    "audio_too_large": Effect.LEFT_OUT,
    BAD_JSON: Effect.LEFT_OUT,
    CHAT_ERROR: Effect.LEFT_OUT,
    CORRUPT_PARQUET: Effect.LEFT_OUT,
    LONG_CHAT: Effect.LEFT_OUT,
    "corrupt_tar": Effect.LEFT_OUT,
    "cut_tar": Effect.LEFT_OUT,
    DUPLICATE_KEY: Effect.LEFT_OUT,
    "empty_document": Effect.LEFT_OUT,
    FAILED_DOWNLOAD: Effect.LEFT_OUT,
    "image_too_large": Effect.LEFT_OUT,
    MISSING_CAPTION: Effect.LEFT_OUT,
    "missing_image": Effect.LEFT_OUT,
    NEEDS_CONVERT: Effect.LEFT_OUT,
    NEEDS_SPECIAL_MEMBER: Effect.LEFT_OUT,
    "not_utf8": Effect.LEFT_OUT,
    ORPHAN_TEXT: Effect.LEFT_OUT,
    "text_too_large": Effect.LEFT_OUT,
    TEXT_TRANSFORM: Effect.LEFT_OUT,
    UNENCODABLE: Effect.LEFT_OUT,
    "too_many_members": Effect.LEFT_OUT,
    "unreadable_header": Effect.LEFT_OUT,
    "video_too_large": Effect.LEFT_OUT,
    CHAT_LEFT_OUT: Effect.SERVED,
    CHAT_NOT_ENDED: Effect.SERVED,
    CUT_CHAT: Effect.SERVED,
    DROPPED_IMAGE: Effect.SERVED,
    DUPLICATE_MEMBER: Effect.SERVED,
    DUPLICATE_SHARD: Effect.SERVED,
    "extra_image": Effect.SERVED,
    LONG_AUDIO: Effect.SERVED,
    LOST_IMAGE: Effect.SERVED,
    MISSING_NAMED_CAPTION: Effect.SERVED,
    MISSING_PARTNER: Effect.SERVED,
    MISSING_SIDECAR: Effect.SERVED,
    SAMPLE_WITHOUT_ROW: Effect.SERVED,
    SPLIT_DOCUMENT: Effect.SERVED,
    TRUNCATED_IMAGE: Effect.SERVED,
    TRANSFORM: Effect.INVALID,
    UNDECODABLE: Effect.INVALID,
    "bad_sidecar": Effect.IGNORED,
    "extension_too_large": Effect.IGNORED,
    ODD_VALUES: Effect.IGNORED,
    ROW_WITHOUT_SAMPLE: Effect.IGNORED,
    "special_member": Effect.IGNORED,
    "too_many_columns": Effect.IGNORED,
    TOO_MANY_SCALARS: Effect.IGNORED,
    "trailing_data": Effect.IGNORED,
    UNREAD_FILE: Effect.IGNORED,
    UNUSABLE_COLUMN: Effect.IGNORED,
    UNUSED_AUDIO: Effect.IGNORED,
    UNUSED_VIDEO: Effect.IGNORED,
    UNUSED_PART: Effect.IGNORED,
    "unsafe_name": Effect.IGNORED,
}
"""Every kind of finding; docs/datasets.md explains each."""
