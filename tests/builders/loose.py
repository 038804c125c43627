"""The samples of tars as manifests with files of their own, and as plain folders."""

import json
import tarfile
from pathlib import Path
from typing import Any


def members_of(tar: Path) -> dict[str, bytes]:
    """Names and contents, in order."""
    with tarfile.open(tar) as opened:
        return {member.name: opened.extractfile(member).read() for member in opened}  # type: ignore[union-attr]


def write_folder(tar: Path, folder: Path) -> None:
    """Unpack a tar."""
    folder.mkdir(parents=True)
    for name, content in members_of(tar).items():
        (folder / name).write_bytes(content)


def write_manifest(tar: Path, path: Path, as_array: bool = False, in_tar: bool = False) -> None:
    """Write a manifest, and the images of a tar into a folder beside it; or name the members of the tar itself."""
    held = members_of(tar)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = f"{path.stem}.tar" if in_tar else f"{path.stem}-files"
    if in_tar:
        (path.parent / folder).write_bytes(tar.read_bytes())
    else:
        write_folder(tar, path.parent / folder)
    objects: list[dict[str, Any]] = []
    for key in dict.fromkeys(name.partition(".")[0] for name in held):
        document = json.loads(held.get(f"{key}.json", b"{}"))
        images = [name for name in held if name.startswith(f"{key}.") and not name.endswith((".txt", ".json"))]
        found = {**document, "key": key}
        if "texts" in document:
            found["images"] = [None if name is None else f"{folder}/{name}" for name in document["images"]]
        else:
            found |= {"image": f"{folder}/{images[0]}", "txt": held[f"{key}.txt"].decode()}
        objects.append(found)
    if as_array:
        path.write_text(json.dumps(objects, ensure_ascii=False, indent=1))
    else:
        path.write_text("".join(f"{json.dumps(one)}\n" for one in objects))
