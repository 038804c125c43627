"""Manifests: JSON that names the files of images, an object for each sample."""

from collections.abc import Iterator

from dataserver.dataset.errors import Findings
from dataserver.dataset.shards.interface import ShardSource
from dataserver.dataset.shards.manifest.objects import json_elements, json_lines
from dataserver.dataset.shards.manifest.samples import scan_objects
from dataserver.dataset.shards.members import Member


class ManifestFormat:
    """A line of JSON for each sample."""

    suffix = ".jsonl"
    sidecar_suffix = ""
    has_external = True
    is_sought = True
    reads_parts = False

    def scan(self, source: ShardSource, findings: Findings) -> Iterator[Member]:
        """Yield the members that the lines of a JSONL manifest name."""
        return scan_objects(json_lines(source.reader.read), source, findings)


class JsonFormat:
    """One array of JSON, as LLaVA has it. It must be named itself: beside images, other files have this suffix."""

    suffix = ".json"
    sidecar_suffix = ""
    has_external = True
    is_sought = False
    reads_parts = False

    def scan(self, source: ShardSource, findings: Findings) -> Iterator[Member]:
        """Yield the members that the elements of a JSON manifest name."""
        return scan_objects(json_elements(source.reader.read), source, findings)
