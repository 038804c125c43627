"""The rules that decide which samples and texts an index has. They stand in its header and in the fingerprint."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Final

from dataserver.dataset.errors import DatasetError
from dataserver.dataset.shards.captions import CaptionSource

_ALWAYS: Final = ("metadata-keys", "on-token-error", "truncated-images", "key", "several-images")
"""Choices that stand there whatever they are."""
_LATER: Final = ("audio", "video", "conversations", "missing-images", "video-sound")
"""Choices that stand there only where they are not the default, as the names of images do: they came afterwards."""
RULES_VERSION: Final = 4
"""Grows with every release that makes other samples, texts, token ids or sizes of the same bytes."""


_JOIN_VERSION: Final = 2
"""As `RULES_VERSION`, of what is joined alone."""


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


class OnTokenError(StrEnum):
    """What becomes of a text that a tokenizer cannot encode."""

    REFUSE = "refuse"
    """Counting ends with an error."""
    SKIP = "skip"
    """Its sample is a finding, and left out of jobs with that tokenizer."""


class TruncatedImages(StrEnum):
    """What becomes of an image whose data end too early."""

    INVALID = "invalid"
    ACCEPT = "accept"
    """It is decoded as far as it goes; the missing part is grey."""


class KeyEnd(StrEnum):
    """Where a member name is cut into key and extension."""

    FIRST_DOT = "first-dot"
    """Keys end at the first dot of the last part, as webdataset does."""
    LAST_DOT = "last-dot"


class SeveralImages(StrEnum):
    """Which images of a sample without a document are served."""

    FIRST = "first"
    ALL = "all"
    """All images, in the order of their names, before the text."""


class MissingImages(StrEnum):
    """What becomes of a document one of whose images is not there, or cannot be read."""

    LEAVE_OUT = "leave-out"
    DROP = "drop"
    """It is served without that image; texts beside it stay texts of their own."""


class MediaMembers(StrEnum):
    """What becomes of members that are audio, of those that are videos, or of the sound of videos that are served."""

    IGNORE = "ignore"
    """Such a member is one like any other that is neither image nor text."""
    SERVE = "serve"
    """They are parts of their samples, as images are; sound is a clip directly behind its video, if it has any."""


class Conversations(StrEnum):
    """How the turns of conversations are stored."""

    DOCUMENT = "document"
    """Turns become texts of an interleaved document, each after its role."""
    CHAT = "chat"
    """Turns also become messages, which the chat template of each tokenizer renders; every sample is a conversation."""


@dataclass(frozen=True, slots=True)
class IndexRules:
    """What the user chooses when a dataset is indexed."""

    text_only: TextOnly = TextOnly.LEAVE_OUT
    metadata_keys: MetadataKeys = MetadataKeys.WHOLE
    allow_duplicates: bool = False
    """Whether shards with the same bytes are served several times. It changes no index of a shard."""
    on_token_error: OnTokenError = OnTokenError.REFUSE
    truncated_images: TruncatedImages = TruncatedImages.INVALID
    key: KeyEnd = KeyEnd.FIRST_DOT
    several_images: SeveralImages = SeveralImages.FIRST
    captions: tuple[CaptionSource, ...] = ()
    """Texts besides the samples' own, in name order."""
    joins: tuple[Path, ...] = ()
    """Folders whose files bring more for the same samples."""
    images_root: Path | None = None
    """What the paths in manifests are relative to; by default the folder of each. It decides where images are looked
    for, and the fingerprint has what they hold."""
    images: frozenset[str] = frozenset()
    """Members that images may be; all where it is empty."""
    audio: MediaMembers = MediaMembers.IGNORE
    conversations: Conversations = Conversations.DOCUMENT
    video: MediaMembers = MediaMembers.IGNORE
    missing_images: MissingImages = MissingImages.LEAVE_OUT
    video_sound: MediaMembers = MediaMembers.IGNORE

    def __post_init__(self) -> None:
        """Raise DatasetError where rules contradict each other."""
        if self.video_sound is MediaMembers.IGNORE:
            return
        if self.video is not MediaMembers.SERVE:
            raise DatasetError("--video-sound serve is the sound of videos, which are ignored; add --video serve")
        if self.conversations is Conversations.CHAT:
            raise DatasetError(
                "--video-sound serve and --conversations chat do not go together: no chat template says where the "
                "sound of a video stands; leave one of them out"
            )


DEFAULT_RULES: Final = IndexRules()


class LoneTexts(StrEnum):
    """What was done with the texts without an image of one shard."""

    ALLOWED = "allowed"
    """They are samples, as the user asked for."""
    LEFT_OUT = "left-out"
    """They are findings: the dataset has images."""
    ALONE = "alone"
    """They are samples: no shard of the dataset has an image."""


def choices(rules: IndexRules) -> dict[str, str]:
    """Return each rule that is one of several words, by its name as flags and headers have it."""
    values = ((field.name.replace("_", "-"), getattr(rules, field.name)) for field in fields(rules))
    return {name: str(value) for name, value in values if isinstance(value, StrEnum)}


def written_rules(lone_texts: LoneTexts, rules: IndexRules) -> str:
    """Return the rules as a header holds them: JSON, a text by the name of each rule."""
    chosen, defaults = choices(rules), choices(DEFAULT_RULES)
    return json.dumps(
        {
            "version": str(RULES_VERSION),
            "texts": lone_texts,
            **{name: chosen[name] for name in _ALWAYS},
            "joins": f"{len(rules.joins)} of version {_JOIN_VERSION}" if rules.joins else "0",
            "captions": json.dumps([f"{source.name}={source}" for source in rules.captions]),
            **({"images": json.dumps(sorted(rules.images))} if rules.images else {}),
            **{name: chosen[name] for name in _LATER if chosen[name] != defaults[name]},
        }
    )


def lone_texts_of(rules: IndexRules, has_images: bool) -> LoneTexts:
    """Return what becomes of lone texts in a dataset with or without images."""
    if rules.text_only is TextOnly.ALLOW:
        return LoneTexts.ALLOWED
    return LoneTexts.LEFT_OUT if has_images else LoneTexts.ALONE


def read_rules(written: str) -> Mapping[str, str]:
    """Return the rules that a header holds, each by its name.

    Raises:
        ValueError: they are those of another release.
    """
    return _read_rules(written, str(RULES_VERSION))


@lru_cache
def _read_rules(written: str, own_version: str) -> Mapping[str, str]:
    try:
        found = json.loads(written)
        version = str(found["version"])
    except (ValueError, TypeError, KeyError):
        version, found = written.partition(" ")[0], {}
    if version != own_version:
        raise ValueError(f"it was made by rules {version[:20]!a} for samples, this program has rules {own_version}")
    expected = json.loads(written_rules(LoneTexts.ALONE, DEFAULT_RULES))
    names = found.keys() - {"images", *_LATER}
    if names != expected.keys() or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"its rules are {written[:200]!a}; those of {sorted(expected)} are required")
    return found  # type: ignore[no-any-return]
