"""What the shards of one open dataset share: parts of their indexes in memory, and digests of what transforms made."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dataserver.dataset.cache import LruCache
from dataserver.dataset.errors import StaleIndexError
from dataserver.dataset.index.format import IndexHeader
from dataserver.dataset.index.numeric import NumericColumns, read_numeric
from dataserver.dataset.index.token_ids import TokenIds
from dataserver.dataset.index.tokens import TokenCounts
from dataserver.dataset.shards.listing import ShardFile

if TYPE_CHECKING:
    import pyarrow as pa

SIZES_CACHE_BYTES: Final = 64 << 20
TEXTS_CACHE_BYTES: Final = 64 << 20
TOKEN_IDS_CACHE_BYTES: Final = 32 << 20
"""Most memory for offsets of token ids; the ids themselves are read from the file each time."""
MAX_OPEN_TOKEN_IDS: Final = 128
"""Each keeps its file open. Of 10,000 texts and more a shard; 400 of such would fit the bytes."""
TOKEN_COUNTS_CACHE_BYTES: Final = 4 << 20
"""A hundred such shards: what plans them needs their counts, and a moment later what opens their ids."""


@dataclass(frozen=True, slots=True)
class IndexCaches:
    """Caches by the shard's position, or by that and what else tells entries from each other."""

    rows: LruCache[NumericColumns]
    texts: LruCache["pa.RecordBatch"]
    counts: LruCache[TokenCounts]
    token_ids: LruCache[TokenIds]
    made: dict[tuple[int, str], bytes] = field(default_factory=dict)
    """Digests of what transforms made, by the shard's position and their key, as it was when it was read first."""

    @classmethod
    def make(cls) -> "IndexCaches":
        """Return empty caches, each with its limit."""
        return cls(
            rows=LruCache(SIZES_CACHE_BYTES, lambda rows: rows.num_bytes),
            texts=LruCache(TEXTS_CACHE_BYTES, lambda batch: int(batch.nbytes)),
            counts=LruCache(TOKEN_COUNTS_CACHE_BYTES, lambda counts: counts.num_bytes),
            token_ids=LruCache(
                TOKEN_IDS_CACHE_BYTES, lambda ids: max(ids.num_bytes, TOKEN_IDS_CACHE_BYTES // MAX_OPEN_TOKEN_IDS)
            ),
        )

    def numeric(self, position: int, file: ShardFile, header: IndexHeader) -> NumericColumns:
        """Return the numeric columns of the shard at this position, which are read if they are not cached."""
        return self.rows.get(position, lambda: read_numeric(file.index_path, header))

    def confirm(self, position: int, file: ShardFile, key: str, digest: bytes) -> None:
        """Note the digest of what a transform made of a shard.

        Raises:
            StaleIndexError: it differs from the digest of what was read first.
        """
        if self.made.setdefault((position, key), digest) != digest:
            raise StaleIndexError(
                f"shard {file.name} was transformed again ({key}) and has other columns or tokens than before: restart "
                "the server, and make a new job"
            )
