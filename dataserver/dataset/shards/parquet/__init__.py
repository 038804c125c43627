"""Shards that are Parquet files with image bytes: where each value lies, found while the file is hashed."""

from collections.abc import Iterator

from dataserver.dataset.errors import Findings
from dataserver.dataset.shards.interface import ShardSource
from dataserver.dataset.shards.members import Member


class ParquetFormat:
    """Parquet as `datasets` and pyarrow write it; a row is a sample, its columns are in the file itself."""

    suffix = ".parquet"
    sidecar_suffix = ""
    has_external = False
    is_sought = True
    reads_parts = True

    def scan(self, source: ShardSource, findings: Findings) -> Iterator[Member]:
        """Yield the members of the rows, as `format.scan_rows`; Arrow is loaded only now."""
        from dataserver.dataset.shards.parquet.format import scan_rows

        return scan_rows(source, findings)
