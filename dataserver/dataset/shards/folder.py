"""A plain folder of images, clips or videos with their texts beside them, as one shard: its files are the members of a
tar.

Members come by key and name, whatever order the files have in the folder.
"""

import json
from collections.abc import Iterator

from dataserver.dataset.errors import DatasetError, Findings, SampleError
from dataserver.dataset.shards.interface import ShardSource
from dataserver.dataset.shards.members import MAX_MEMBER_BYTES, MAX_TEXT_BYTES, Member
from dataserver.dataset.shards.modalities import IMAGES, modality_of_suffix
from dataserver.dataset.shards.tar import name_problem
from dataserver.dataset.storage.folder_listings import LISTING_NAME, is_media


class FolderFormat:
    """Images, clips and videos as files of their own."""

    suffix = LISTING_NAME
    sidecar_suffix = ""
    has_external = True
    is_sought = False
    reads_parts = False

    def scan(self, source: ShardSource, findings: Findings) -> Iterator[Member]:
        """Yield the files as members; as `ShardFormat.scan`."""
        found: list[tuple[str, str, str, int]] = []
        for line in source.reader.read(source.reader.size).splitlines():
            name, size = json.loads(line)
            if problem := name_problem(name):
                findings.add("", "unsafe_name", f"{name}: the file name {problem}")
            elif parts := source.split(name):
                found.append((*parts, name, size))
        for key, extension, name, size in sorted(found):
            yield self._member(source, key, extension, name, size, findings)

    def _member(
        self, source: ShardSource, key: str, extension: str, name: str, size: int, findings: Findings
    ) -> Member:
        files = source.external
        assert files is not None
        if size < 0:
            findings.add(key, "special_member", f"{name} is no regular file")
            return Member(extension, 0, 0, None, special=True, key=key)
        kind = extension.rpartition(".")[2]
        modality = modality_of_suffix(kind, source.media)
        is_unused = modality is None and is_media(name)  # counted by its name, so that nobody need read it
        if is_unused or size > (MAX_TEXT_BYTES if modality is None else MAX_MEMBER_BYTES):
            return Member(extension, 0, size, None, key=key)
        try:
            content, part = files.read(name, modality or IMAGES)
            if modality is None or not modality.is_claimed(kind, content):
                files.note_read(part)
                return Member(extension, 0, size, content, key=key)
            return Member(extension, 0, size, None, key=key, parsed=files.image(content, part, modality))
        except SampleError as error:
            return Member(extension, 0, size, None, key=key, parsed=error)
        except DatasetError as error:
            return Member(extension, 0, size, None, key=key, parsed=SampleError("missing_image", str(error)))
