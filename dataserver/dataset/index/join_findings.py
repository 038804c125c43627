"""What no single shard shows of joined files: rows of a table without any sample, files that belong to no shard.

`dataserver index` finds it when all shards are indexed, and writes it beside the indexes, with the fingerprint that it
belongs to.
"""

import logging
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Final

from dataserver.dataset.errors import DatasetError, ShardFinding, canonical
from dataserver.dataset.index.format import IndexHeader
from dataserver.dataset.index.joins import Joins, unread_files
from dataserver.dataset.index.notes import read_note, write_note
from dataserver.dataset.index.rules import IndexRules, MetadataKeys
from dataserver.dataset.index.sets import fingerprint_of
from dataserver.dataset.kinds import UNREAD_FILE
from dataserver.dataset.shards.listing import ShardFile

JOINS_NAME: Final = "disttrain.joins"
_MAX_BYTES: Final = 16 << 20

_log = logging.getLogger(__name__)


def note_join_findings(
    folder: Path,
    shards: Sequence[ShardFile],
    headers: Sequence[tuple[str, IndexHeader]],
    joins: Joins,
    rules: IndexRules,
) -> None:
    """Compare tables with the samples of all shards; write what is found into the folder of the indexes.

    Args:
        folder: of the indexes.
        shards: of the dataset.
        headers: of their indexes, by name.
        joins: what is joined to them.
        rules: of the index.

    Raises:
        DatasetError: no row of a table belongs to a sample, or one belongs to samples of several shards.
    """
    path = folder / JOINS_NAME
    found = [ShardFinding(str(file), "", UNREAD_FILE, why) for file, why in unread_files(joins, rules.joins)]
    if joins.tables:
        from dataserver.dataset.index.table_rows import lost_rows  # with Arrow, which servers load late

        found += lost_rows(shards, dict(headers), joins.tables, rules.metadata_keys is MetadataKeys.LAST_PART)
    try:
        if not found:
            path.unlink(missing_ok=True)
            return
        write_note(path, canonical([fingerprint_of(headers), [astuple(one) for one in found]]))
    except (DatasetError, OSError) as error:
        _log.warning("%s; lint does not list %d findings of joined files", error, len(found))


def read_join_findings(folder: Path, headers: Sequence[tuple[str, IndexHeader]]) -> list[ShardFinding]:
    """Return what was found for the shards as they are indexed now; nothing where that is not known."""
    path = folder / JOINS_NAME
    try:
        fingerprint, entries = read_note(path, _MAX_BYTES)
        if fingerprint != fingerprint_of(headers):
            return []
        return [ShardFinding(*map(str, entry)) for entry in entries]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, RecursionError) as error:
        _log.warning("%s cannot be used (%s); dataserver index makes it again", path, error)
        return []
