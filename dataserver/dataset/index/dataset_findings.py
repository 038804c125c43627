"""What is wrong with a dataset as a whole: files that nobody reads, shards without metadata, copies, lost rows."""

from collections.abc import Iterator, Sequence

from dataserver.dataset.errors import ShardFinding
from dataserver.dataset.index.copies import copies
from dataserver.dataset.index.format import NO_SIDECAR
from dataserver.dataset.index.join_findings import read_join_findings
from dataserver.dataset.index.summary import IndexContent
from dataserver.dataset.kinds import DUPLICATE_SHARD, MISSING_SIDECAR, UNREAD_FILE
from dataserver.dataset.shards.listing import Listing, index_folder
from dataserver.dataset.shards.unread import FOLDER_LINK


def dataset_findings(listing: Listing, contents: Sequence[tuple[str, IndexContent]]) -> Iterator[ShardFinding]:
    """Yield findings that no single shard shows.

    Args:
        listing: what lies at the dataset's path.
        contents: of the index of each shard, by name.
    """
    for name, remedy in (*listing.unread, *((link, FOLDER_LINK) for link in listing.links)):
        yield ShardFinding(name, "", UNREAD_FILE, remedy)
    headers = [(name, found.header) for name, found in contents]
    yield from read_join_findings(index_folder(listing.shards[0]), headers)
    sidecars = [name for name, found in contents if found.header.sidecar_bytes != NO_SIDECAR and found.columns]
    for name, found in contents:
        header = found.header
        if sidecars and header.num_samples and header.sidecar_bytes == NO_SIDECAR and not found.columns:
            detail = f"{sidecars[0]} has a parquet beside it, this one has no columns at all: all its values are null"
            yield ShardFinding(name, "", MISSING_SIDECAR, detail)
    for first, *others in copies(headers):
        for name in others:
            yield ShardFinding(name, "", DUPLICATE_SHARD, f"the bytes of {first}; every sample is served again")
