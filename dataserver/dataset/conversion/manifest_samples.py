"""The objects of a manifest as samples of a tar: what they say, and the image, audio and video files that they name.

What cannot be used is a finding, and so is a file that is missing; its sample is written with what it has.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from dataserver.dataset.conversion.parquet_samples import MAX_LINE_BYTES
from dataserver.dataset.conversion.tar_samples import tar_key, tar_sample
from dataserver.dataset.conversion.tar_writer import Members
from dataserver.dataset.errors import Findings, SampleError, printable
from dataserver.dataset.shards.external import ExternalFiles
from dataserver.dataset.shards.manifest.objects import json_elements, json_lines
from dataserver.dataset.shards.manifest.samples import load_image, object_members
from dataserver.dataset.shards.modalities import Media, StoredModality
from dataserver.dataset.shards.parts import ExternalPart
from dataserver.dataset.storage.registry import storage_of


def manifest_samples(path: Path, findings: Findings, files: ExternalFiles, media: Media) -> Iterator[Members]:
    """Yield the members of each object, in order.

    Args:
        path: the manifest: lines of JSON, or one array where its name ends in `.json`.
        findings: where objects and images are counted that cannot be used.
        files: reads the files, and notes their states.
        media: what is read; the entries that name others stay entries.

    Raises:
        OSError: storage failed.
    """
    keys: set[str] = set()
    with storage_of(path).open(path) as file:
        objects = json_elements if path.name.lower().endswith(".json") else json_lines
        for number, found in objects(file.read):
            if isinstance(found, SampleError):
                findings.add("", found.kind, found.detail)
                continue
            members = object_members(
                number, found, partial(_files, files), keys, findings, tar_key, media, keeps_documents=True
            )
            if sample := tar_sample([*members], findings):
                yield sample


def _files(files: ExternalFiles, names: Sequence[object], modality: StoredModality) -> list[bytes | SampleError | None]:
    """Read the files in one entry of an object; those beyond `MAX_LINE_BYTES` together are left out."""

    def take(content: bytes, part: ExternalPart) -> bytes:
        files.note_read(part)
        return content

    found: list[bytes | SampleError | None] = []
    left = MAX_LINE_BYTES
    for name in names:
        found.append(content := load_image(files, name, take, modality))
        left -= len(content) if isinstance(content, bytes) else 0
        if left < 0:
            detail = f"{printable(str(name), 80)!a}: more than {MAX_LINE_BYTES} bytes in all {modality.name} of a line"
            found[-1] = SampleError(modality.too_large, detail)
            left = 0
    return found
