"""Whether an index belongs to its shard as it is now."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dataserver.dataset.errors import DatasetError, StaleIndexError
from dataserver.dataset.index.external_files import read_external
from dataserver.dataset.index.flags import index_command
from dataserver.dataset.index.format import NO_SIDECAR, IndexHeader, read_schema
from dataserver.dataset.index.known import read_known, state_of
from dataserver.dataset.index.summary import IndexContent, Summary
from dataserver.dataset.shards.listing import INDEX_SUFFIX, ShardFile, index_folder
from dataserver.dataset.storage.digests import digest_file
from dataserver.dataset.storage.etags import Etag

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IndexedShard:
    """A shard whose index has its size and format."""

    file: ShardFile
    content: IndexContent
    etags: tuple[Etag, Etag | None]
    """Etags of the shard and its sidecar, before their contents were compared with the index."""
    is_known: bool
    """Whether their contents are those of the index; else they may be others of the same sizes."""
    is_late: bool
    """Whether one of the two changed after the index was written."""

    @property
    def header(self) -> IndexHeader:
        """What the index says of its shard as a whole."""
        return self.content.header

    @property
    def columns(self) -> Mapping[str, str]:
        """Sidecar columns: name -> Arrow type."""
        return self.content.columns

    def changed_file(self) -> Path | None:
        """Read the shard and its sidecar; the first with another content than the index describes. Raises OSError."""
        header = self.header
        if digest_file(self.file.path) != header.sha256:
            return self.file.path
        if self.file.format.has_external and (text := read_external(self.file, header).changed_text()):
            return text
        sidecar = self.file.sidecar_path
        return sidecar if sidecar and header.sidecar_sha256 and digest_file(sidecar) != header.sidecar_sha256 else None


def read_fresh_index(
    shard: ShardFile, summary: Summary | None = None, lazily: bool = False, any_rules: bool = False
) -> IndexedShard:
    """Read what a shard's index says of it, after comparing contents where they are not known.

    Args:
        shard: the shard.
        summary: of its dataset's indexes.
        lazily: leave it to whoever reads the shard, unless it changed after the index was written.
        any_rules: as in `read_schema`.

    Raises:
        StaleIndexError: the index is missing, unreadable, or does not belong to the shard as it is now.
        DatasetError: the shard cannot be reached.
    """
    indexed = read_index(shard, summary, any_rules)
    if indexed.is_known or (lazily and not indexed.is_late):
        return indexed
    _log.info(
        "%s may have changed since it was indexed: comparing contents; %s does so once",
        *(shard.path, index_command(shard)),
    )
    try:
        etags = shard.settled_etags()
        changed = indexed.changed_file()
    except OSError as error:
        raise _unreachable(shard, error) from error
    if changed is not None:
        raise _stale(shard, f"its index describes another content of {changed.name}")
    return replace(indexed, etags=etags, is_known=True)


def read_index(shard: ShardFile, summary: Summary | None = None, any_rules: bool = False) -> IndexedShard:
    """Read what a shard's index says of it, or take it from the dataset's summary where that is as good.

    Contents are not compared. Raises as `read_fresh_index`.
    """
    try:
        written = os.stat(f"{index_folder(shard)}/{shard.name}{INDEX_SUFFIX}")  # noqa: PTH116
        content = None if summary is None else summary.find(shard.name, written)
        if content is None:
            content = IndexContent(*read_schema(shard.index_path, any_rules), written.st_size, None)
    except FileNotFoundError as error:
        raise _stale(shard, f"it has no index at {shard.index_path}") from error
    except (OSError, StaleIndexError) as error:
        raise _stale(shard, str(error)) from error
    try:
        etag, sidecar = etags = shard.listed or shard.etags()
    except OSError as error:
        raise _unreachable(shard, error) from error
    header, state = content.header, state_of(etags)
    if etag.num_bytes != header.shard_bytes:
        raise _stale(shard, f"its index describes {header.shard_bytes} bytes, it has {etag.num_bytes}")
    if (sidecar.num_bytes if sidecar else NO_SIDECAR) != header.sidecar_bytes:
        name = shard.sidecar_path.name if shard.sidecar_path else "sidecar"
        raise _stale(shard, f"its index was made with another {name}")
    if content.known != state and (known := read_known(shard.index_path, header)) != content.known:
        content = replace(content, known=known)
    # Equal times prove nothing: file systems count them in milliseconds.
    is_late = any(s is not None and s.ctime_ns >= written.st_ctime_ns for s in etags)
    return IndexedShard(shard, content, etags, content.known == state, is_late)


def _unreachable(shard: ShardFile, error: OSError) -> DatasetError:
    return DatasetError(f"shard {shard.path} cannot be reached: {error}; check the storage")


def _stale(shard: ShardFile, reason: str) -> StaleIndexError:
    return StaleIndexError(f"shard {shard.path}: {reason}; run: {index_command(shard)}")
