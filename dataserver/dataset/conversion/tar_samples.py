"""Names of members in a tar, for samples of other formats."""

import json
from typing import Any, Final

from dataserver.dataset.conversion.tar_writer import Members
from dataserver.dataset.errors import Findings, SampleError
from dataserver.dataset.shards.interface import Member
from dataserver.images import sniff_format

_EXTENSIONS: Final = {"jpeg": "jpg", "png": "png", "webp": "webp"}


def tar_sample(members: list[Member], findings: Findings) -> Members:
    """Give the members of a row their names in a tar. A dot in a key becomes `_`: keys of tars end at the first one.

    Args:
        members: of one row.
        findings: where images are counted that are missing; the sample is written without them.
    """
    folder, slash, base = (members[0].key or "").rpartition("/")
    key = folder + slash + base.replace(".", "_")
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
            names[f"{member.key}.{member.name}"] = f"{key}.{member.name.removesuffix('img')}{extension}"
            found.append((names[f"{member.key}.{member.name}"], content))
    if isinstance(document.get("images"), list):
        images = [names.get(name, name) if isinstance(name, str) else name for name in document["images"]]
        document = {**document, "images": images}
    return [*found, (f"{key}.json", json.dumps(document, ensure_ascii=False, default=str).encode())]
