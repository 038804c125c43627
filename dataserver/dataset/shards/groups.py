"""The members of one sample, as they are collected."""

from dataclasses import dataclass, field
from typing import Any, Final

from dataserver.dataset.errors import Findings, SampleError
from dataserver.dataset.kinds import DUPLICATE_MEMBER
from dataserver.dataset.shards.media_members import claimed, media_member
from dataserver.dataset.shards.members import Member, caught, decode_text, parse_json
from dataserver.dataset.shards.modalities import IMAGES, StoredModality
from dataserver.dataset.shards.parts import ImagePart
from dataserver.dataset.shards.sample_rules import SampleRules

MAX_SAMPLE_MEMBERS: Final = 4096
"""Limit of the members of one sample, and of the parts of one interleaved document."""


@dataclass(slots=True)
class Group:
    """The members of one key's run; images are reduced to their headers on arrival to bound the memory."""

    key: str
    rules: SampleRules
    num_members: int = 0
    images: dict[str, ImagePart | SampleError] = field(default_factory=dict)
    """Image members by extension, in the order of the tar."""
    others: dict[str, ImagePart | SampleError] = field(default_factory=dict)
    """Members that are audio or videos in the same way, where they are served."""
    modalities: dict[str, StoredModality] = field(default_factory=dict)
    """What each of the others is."""
    texts: dict[str, str | SampleError] = field(default_factory=dict)
    """Members that are captions, by extension."""
    entries: dict[str, dict[str, Any] | SampleError] = field(default_factory=dict)
    """JSON members that hold captions, by extension."""
    extensions: list[str] = field(default_factory=list)
    """Extensions of the group's members, in order."""
    text: str | SampleError | None = None
    document: dict[str, Any] | SampleError | None = None

    @property
    def has_media(self) -> bool:
        """Whether a member is an image, audio or a video."""
        return bool(self.images or self.others)

    @property
    def media(self) -> dict[str, ImagePart | SampleError]:
        """Members that are images, audio or videos."""
        return self.images | self.others

    @property
    def types(self) -> set[str]:
        """Last part of the extension of each member."""
        return {extension.rpartition(".")[2] for extension in self.extensions}


def add_member(group: Group, extension: str, member: Member, findings: Findings) -> None:
    """Add a member; one that comes twice is a finding."""
    group.num_members += 1
    if group.num_members > MAX_SAMPLE_MEMBERS:
        return
    group.extensions.append(extension)
    duplicate = False
    if extension == "txt":
        duplicate = group.text is not None
        group.text = group.text if duplicate else caught(decode_text, member)
    elif extension == "json":
        duplicate = group.document is not None
        group.document = group.document if duplicate else caught(parse_json, member)
    elif group.rules.captions and any(extension == source.part for source in group.rules.captions):
        duplicate = extension in group.texts or extension in group.entries
        if not duplicate:
            _add_captions(group, extension, member)
    elif group.rules.images and extension not in group.rules.images:
        return
    elif (modality := claimed(extension, member, group.rules.media)) is not None:
        duplicate = _add_media(group.images if modality is IMAGES else group.others, modality, extension, member)
        if modality is not IMAGES:
            group.modalities.setdefault(extension, modality)
    if duplicate:
        findings.add(group.key, DUPLICATE_MEMBER, f"{member.name} comes twice; the first is kept")


def _add_media(
    found: dict[str, ImagePart | SampleError], modality: StoredModality, extension: str, member: Member
) -> bool:
    """Add a member of a modality; whether another one of the same extension came before."""
    if extension in found:
        return True
    found[extension] = caught(lambda member: media_member(modality, member), member)
    return False


def _add_captions(group: Group, extension: str, member: Member) -> None:
    fields = [source.field for source in group.rules.captions if source.part == extension]
    if "" in fields:
        group.texts[extension] = caught(decode_text, member)
    if any(fields):
        group.entries[extension] = caught(parse_json, member)
