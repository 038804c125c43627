"""Folders of image, audio and video files as samples of a tar: the files keep their names and bytes."""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

from dataserver.dataset.conversion.tar_writer import Members
from dataserver.dataset.errors import DatasetError, Findings, SampleError
from dataserver.dataset.shards.external import ExternalFiles
from dataserver.dataset.shards.groups import MAX_SAMPLE_MEMBERS
from dataserver.dataset.shards.members import MAX_MEMBER_BYTES, MAX_TEXT_BYTES
from dataserver.dataset.shards.modalities import ALL_MEDIA, IMAGES, modality_of_suffix
from dataserver.dataset.shards.tar import name_problem, split_at_last_dot, split_name
from dataserver.dataset.storage.registry import storage_of

MAX_RUN_BYTES: Final = 1 << 30
"""Files that share what stands before their first dot are held together up to so many bytes."""


def loose_samples(path: Path, findings: Findings, files: ExternalFiles) -> Iterator[Members]:
    """Yield the files of each sample, in the order of their keys.

    They lie together whether keys end at the first dot of a name or at the last one. Where too many share what stands
    before the first dot (`frame.00001.jpg`, `frame.00002.jpg`), only those up to the last dot are sure to.

    Args:
        path: the listing of the folder.
        findings: where files are counted that no tar can hold.
        files: reads the files, and notes their states.

    Raises:
        DatasetError: a file is gone.
        OSError: storage failed.
    """
    found: list[tuple[str, str, str, int]] = []
    with storage_of(path).open(path) as listing:
        for line in listing:
            name, size = json.loads(line)
            first, last = split_name(name), split_at_last_dot(name)
            if problem := name_problem(name):
                findings.add("", "unsafe_name", f"{name}: the file name {problem}")
            elif first is not None and last is not None:
                found.append((first[0], last[0], name, size))
    for _, same_first in groupby(sorted(found), key=lambda entry: entry[0]):
        run = [*same_first]
        is_large = len(run) > MAX_SAMPLE_MEMBERS or sum(max(size, 0) for *_, size in run) > MAX_RUN_BYTES
        for _, group in groupby(run, key=lambda entry: entry[1]) if is_large else [("", iter(run))]:
            contents = ((name, _content(key, name, size, findings, files)) for key, _, name, size in group)
            if sample := [(name, content) for name, content in contents if content is not None]:
                yield sample


def _content(key: str, name: str, size: int, findings: Findings, files: ExternalFiles) -> bytes | None:
    """The bytes of a file; None where it cannot be a member, which is counted."""
    modality = modality_of_suffix(name.rpartition(".")[2].lower(), ALL_MEDIA)
    limit, kind = (MAX_TEXT_BYTES, "text_too_large")
    if modality is not None:
        limit, kind = MAX_MEMBER_BYTES, modality.too_large
    if size < 0:
        findings.add(key, "special_member", f"{name} is no regular file")
        return None
    if size > limit:
        findings.add(key, kind, f"{name[:80]}: {size} bytes, limit {limit}")
        return None
    try:
        content, part = files.read(name, modality or IMAGES)
        files.note_read(part)
    except SampleError as error:  # it grew, or there are too many
        findings.add(key, error.kind, error.detail)
        return None
    if len(content) != size:
        raise DatasetError(f"{files.root / name} changed while it was converted; run it again when it is complete")
    return content
