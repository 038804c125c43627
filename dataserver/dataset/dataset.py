"""Read-only handle of an indexed dataset: its shards, its fingerprint, and the bytes of its images.

Opening reads the schema of every index and nothing else; columns, text batches and file descriptors are held in small
bounded caches. All methods may be called from several threads.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Final

from dataserver.dataset.cache import LruCache
from dataserver.dataset.errors import DatasetError, ShardReadError
from dataserver.dataset.files import find_shards, read_fresh_schema
from dataserver.dataset.headers import MAX_IMAGE_BYTES
from dataserver.dataset.quarantine import Quarantine
from dataserver.dataset.shard import IMAGE_COLUMNS, ImageRef, IndexCaches, Shard

SIZES_CACHE_BYTES: Final = 64 << 20
TEXTS_CACHE_BYTES: Final = 64 << 20
MAX_OPEN_SHARDS: Final = 128


class _Descriptor:
    """A file descriptor that is closed when nobody uses it any more, so that a cache can drop it at any time."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self.number).st_size
        if found != num_bytes:
            raise ShardReadError(f"{path} has {found} bytes, its index describes {num_bytes}; index it again")

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class Dataset:
    """An indexed dataset, opened for reading."""

    def __init__(self, shards: tuple[Shard, ...], quarantine: Quarantine | None) -> None:
        self.shards = shards
        self.quarantine = quarantine
        self.fingerprint = _fingerprint(shards)
        """sha256, hex, of the names, bytes and index columns of all shards; the same for a copy elsewhere."""
        self._descriptors: LruCache[_Descriptor] = LruCache(MAX_OPEN_SHARDS, lambda _: 1)

    @classmethod
    def open(
        cls, path: Path, index_dir: Path | None = None, quarantine: Path | None = None, may_be_empty: bool = False
    ) -> "Dataset":
        """Open the dataset at `path`, a folder of shards or one shard.

        Args:
            path: where the shards lie.
            index_dir: where the indexes lie instead of beside the shards.
            quarantine: list of samples to leave out.
            may_be_empty: open it even if it has no usable sample.

        Raises:
            StaleIndexError: an index is missing or older than its shard; names the command to run.
            QuarantineError: the list cannot be read.
            DatasetError: there is no dataset at `path`, or it has no usable sample.
        """
        files = find_shards(path, index_dir)
        schemas = [read_fresh_schema(file) for file in files]
        if not may_be_empty and not any(header.num_samples for header, _ in schemas):
            raise DatasetError(
                f"the {len(files)} shards at {path} have no usable sample; see what is wrong: dataserver lint {path}"
            )
        known = frozenset(IMAGE_COLUMNS).union(*(columns for _, columns in schemas))
        caches = IndexCaches(
            rows=LruCache(SIZES_CACHE_BYTES, lambda rows: rows.num_bytes),
            texts=LruCache(TEXTS_CACHE_BYTES, lambda batch: int(batch.nbytes)),
        )
        shards = tuple(
            Shard(position, file, header, columns, known, caches)
            for position, (file, (header, columns)) in enumerate(zip(files, schemas, strict=True))
        )
        return cls(shards, None if quarantine is None else Quarantine.load(quarantine))

    def read(self, ref: ImageRef) -> bytes:
        """Read an image's encoded bytes.

        Raises:
            ShardReadError: storage failed or gave fewer bytes than the index promises; says nothing about the sample.
        """
        shard = self.shards[ref.shard]
        if not 0 <= ref.length <= MAX_IMAGE_BYTES:
            raise ShardReadError(f"shard {shard.name}: an image of {ref.length} bytes, the limit is {MAX_IMAGE_BYTES}")
        try:
            descriptor = self._descriptors.get(
                ref.shard, lambda: _Descriptor(shard.file.path, shard.header.shard_bytes)
            )
            data = os.pread(descriptor.number, ref.length, ref.offset)
        except OSError as error:
            self._descriptors.drop(ref.shard)
            raise ShardReadError(f"cannot read {shard.file.path}: {error}; check the storage") from error
        if len(data) != ref.length:
            self._descriptors.drop(ref.shard)
            raise ShardReadError(
                f"{shard.file.path} gave {len(data)} of {ref.length} bytes at {ref.offset}; was it cut? index it again"
            )
        return data


def _fingerprint(shards: tuple[Shard, ...]) -> str:
    digest = hashlib.sha256(b"disttrain dataset\n")
    for shard in shards:
        line = json.dumps([shard.name, shard.header.sha256, shard.header.columns_digest])
        digest.update(line.encode("ascii") + b"\n")
    return digest.hexdigest()
