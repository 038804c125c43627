"""Which members of a shard are media, and what an index holds of them."""

from dataserver.dataset.errors import SampleError
from dataserver.dataset.shards.members import MAX_MEMBER_BYTES, Member
from dataserver.dataset.shards.modalities import MODALITIES, Media, StoredModality, modality_of_part
from dataserver.dataset.shards.parts import ImagePart


def claimed(extension: str, member: Member, media: Media) -> StoredModality | None:
    """The modality that a member is of, or claims to be of."""
    if isinstance(member.parsed, ImagePart):
        return modality_of_part(member.parsed)
    if member.modality:
        return MODALITIES[member.modality]
    return next((modality for modality in media if _claims(modality, extension, member)), None)


def _claims(modality: StoredModality, extension: str, member: Member) -> bool:
    """Whether a member is of a modality by its extension, or by its content."""
    if modality.is_claimed(extension.rpartition(".")[2], member.content):
        return True
    return member.content is not None and modality.matches(member.content)


def media_member(modality: StoredModality, member: Member) -> ImagePart:
    """Return what an index holds of a member of a modality. Raises SampleError where it is too large or none."""
    if member.content is None:
        raise SampleError(modality.too_large, f"{member.length} bytes, limit {MAX_MEMBER_BYTES}")
    return modality.read(member.content, member.offset)
