"""Names of members in a tar, for samples of other formats."""

import json
from pathlib import PurePosixPath
from typing import Any, Final

from dataserver.dataset.conversion.tar_writer import Members
from dataserver.dataset.errors import Findings, SampleError
from dataserver.dataset.shards.interface import MAX_MEMBER_BYTES, Member
from dataserver.dataset.shards.tar import name_problem
from dataserver.images import sniff_format

_EXTENSIONS: Final = {"jpeg": "jpg", "png": "png", "webp": "webp"}


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
        findings: where images are counted that are missing, and what no tar can hold; the sample is written without
            them.
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
            extension = _EXTENSIONS.get(sniff_format(content) or "", "img")
            name = f"{key}.{member.name.removesuffix('img').replace('/', '_')}{extension}"
            names[f"{key}.{member.name}"] = name
            found.append((name, content))
    if isinstance(document.get("images"), list):
        images = [names.get(name, name) if isinstance(name, str) else name for name in document["images"]]
        document = {**document, "images": images}
    if members:
        found.append((f"{key}.json", json.dumps(document, ensure_ascii=False, default=str).encode()))
    return [one for one in found if _fits(*one, key or "", findings)]


def _fits(name: str, content: bytes, key: str, findings: Findings) -> bool:
    """Whether a tar can hold a member; counts it where not."""
    if problem := name_problem(name):
        findings.add(key, "unsafe_name", f"{name[:80]}: the member name {problem}")
    elif len(content) > MAX_MEMBER_BYTES:
        kind = "text_too_large" if name.endswith((".txt", ".json")) else "image_too_large"
        findings.add(key, kind, f"{name[:80]}: {len(content)} bytes, limit {MAX_MEMBER_BYTES}")
    else:
        return True
    return False
