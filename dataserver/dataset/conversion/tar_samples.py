"""Names of members in a tar, for samples of other formats."""

import json
from pathlib import PurePosixPath
from typing import Any, Final

from dataserver.audio import audio_format_of
from dataserver.dataset.conversion.tar_writer import Members
from dataserver.dataset.errors import Findings, SampleError
from dataserver.dataset.shards.members import MAX_MEMBER_BYTES, Member
from dataserver.dataset.shards.modalities import ALL_MEDIA, AUDIO, ENDINGS, IMAGES, VIDEO, modality_of_suffix
from dataserver.dataset.shards.tar import name_problem
from dataserver.images import sniff_format
from dataserver.video import video_format_of

_EXTENSIONS: Final = {"jpeg": "jpg", "png": "png", "webp": "webp"}
_OF_CLIPS: Final = {"vorbis": "ogg"}
"""Those of the other formats of audio are called as these."""
_OF_VIDEOS: Final = {"mp4": "mp4", "mpegts": "ts"}
"""Matroska has two, one for sound alone."""
_UNKNOWN: Final = {IMAGES.number: "img", AUDIO.number: "wav", VIDEO.number: "mp4"}
"""Extensions of what begins as nothing that is read: an index tries them as what their columns say, and names them."""


def tar_key(key: str | None) -> str | None:
    """The key that a row has in a tar: a dot in its last part becomes `_`, since keys of tars end at the first one.

    What no tar can have is returned as it is.
    """
    if not key or name_problem(key):
        return key
    folder, slash, base = str(PurePosixPath(key)).rpartition("/")  # without `./`, or a slash at the end
    return folder + slash + base.replace(".", "_")


def tar_sample(members: list[Member], findings: Findings) -> Members:
    """Give the members of a row their names in a tar.

    Args:
        members: of one row, whose key is one of `tar_key`; none where the row is left out.
        findings: where images, clips and videos are counted that are missing, and what no tar can hold; the sample is
            written without them.
    """
    key = members[0].key if members else ""
    names: dict[str, str] = {}
    document: dict[str, Any] = {}
    found: list[tuple[str, bytes]] = []
    for member in members:
        if isinstance(member.parsed, SampleError):
            if member.name != "txt":  # an index says that texts are missing
                findings.add(member.key or "", member.parsed.kind, member.parsed.detail)
            continue
        if member.name == "json":
            document = member.parsed
        elif member.name == "txt":
            found.append((f"{key}.txt", member.content or b""))
        else:
            content = member.content or b""
            prefix = member.name.removesuffix(next(ending for ending in ENDINGS if member.name.endswith(ending)))
            name = f"{key}.{prefix.replace('/', '_')}{_extension(content, member.modality)}"
            names[f"{key}.{member.name}"] = name
            found.append((name, content))
    if isinstance(document.get("images"), list):
        images = [names.get(name, name) if isinstance(name, str) else name for name in document["images"]]
        document = {**document, "images": images}
    if members:
        found.append((f"{key}.json", json.dumps(document, ensure_ascii=False, default=str).encode()))
    return [one for one in found if _fits(*one, key or "", findings)]


def _extension(content: bytes, modality: int) -> str:
    """The type of a file by how it begins, or by the number of the modality that it must be of."""
    if (image := sniff_format(content)) is not None:
        return _EXTENSIONS.get(image, "img")
    if (video := video_format_of(content)) is not None:
        return _OF_VIDEOS.get(video.name, "webm" if modality == AUDIO.number else "mkv")
    if (clip := audio_format_of(content)) is not None:
        return _OF_CLIPS.get(clip.name, clip.name)
    return _UNKNOWN[modality]


def _fits(name: str, content: bytes, key: str, findings: Findings) -> bool:
    """Whether a tar can hold a member; counts it where not."""
    if problem := name_problem(name):
        findings.add(key, "unsafe_name", f"{name[:80]}: the member name {problem}")
    elif len(content) > MAX_MEMBER_BYTES:
        modality = modality_of_suffix(name.rpartition(".")[2], ALL_MEDIA)
        kind = "text_too_large" if modality is None else modality.too_large
        findings.add(key, kind, f"{name[:80]}: {len(content)} bytes, limit {MAX_MEMBER_BYTES}")
    else:
        return True
    return False
