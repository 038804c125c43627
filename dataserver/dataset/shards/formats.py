"""The formats of shards. The shards of a dataset are of the first one that any of its files has."""

from collections.abc import Iterator
from typing import Final

from dataserver.dataset.errors import Findings
from dataserver.dataset.shards.folder import FolderFormat
from dataserver.dataset.shards.interface import ShardFormat, ShardSource
from dataserver.dataset.shards.manifest import JsonFormat, ManifestFormat
from dataserver.dataset.shards.members import Member
from dataserver.dataset.shards.parquet import ParquetFormat
from dataserver.dataset.shards.tar import scan_members


class TarFormat:
    """Shards as img2dataset and webdataset write them, with a parquet beside each or none."""

    suffix = ".tar"
    sidecar_suffix = ".parquet"
    has_external = False
    is_sought = True
    reads_parts = False

    def scan(self, source: ShardSource, findings: Findings) -> Iterator[Member]:
        """Yield the members of a tar, as `scan_members` finds them."""
        return scan_members(source.reader, findings, source.split)


FORMATS: Final[tuple[ShardFormat, ...]] = (TarFormat(), ParquetFormat(), ManifestFormat(), JsonFormat(), FolderFormat())


def format_of(name: str) -> ShardFormat | None:
    """Return the format of a shard by its name; None for any other file."""
    return next((found for found in FORMATS if name.endswith(found.suffix)), None)
