"""The formats of shards, one line each. The shards of a dataset are of the first one that any of its files has."""

from typing import Final

from dataserver.dataset.shards.folder import FolderFormat
from dataserver.dataset.shards.interface import ShardFormat
from dataserver.dataset.shards.manifest import JsonFormat, ManifestFormat
from dataserver.dataset.shards.parquet import ParquetFormat
from dataserver.dataset.shards.tar import TarFormat

FORMATS: Final[tuple[ShardFormat, ...]] = (TarFormat(), ParquetFormat(), ManifestFormat(), JsonFormat(), FolderFormat())


def format_of(name: str) -> ShardFormat | None:
    """Return the format of a shard by its name; None for any other file."""
    return next((found for found in FORMATS if name.endswith(found.suffix)), None)
