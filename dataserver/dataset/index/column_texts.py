"""Texts for images that have none of their own: named captions that are columns of a sidecar or of joined tables."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from dataserver.dataset.errors import Findings, is_of_storage
from dataserver.dataset.index.joins import PARQUET_SUFFIX, ShardJoins
from dataserver.dataset.index.rules import IndexRules, MetadataKeys
from dataserver.dataset.shards.captions import PARQUET
from dataserver.dataset.shards.listing import ShardFile
from dataserver.dataset.shards.members import usable_caption
from dataserver.dataset.shards.parquet_columns import parquet_columns
from dataserver.dataset.shards.row_match import RowMatch


def texts_of_columns(
    shard: ShardFile, rules: IndexRules, joins: ShardJoins, wanted: Collection[str], keys: Collection[str]
) -> Mapping[str, str]:
    """Return the first caption, in the order of their names, that columns have for each of some samples; those without
    one are missing.

    A parquet that cannot be used gives none: whoever reads its columns says so.

    Args:
        shard: the shard.
        rules: of the index, which name captions.
        joins: what is joined to the shard.
        wanted: keys of the samples that have no text.
        keys: of all samples, among which rows find theirs.

    Raises:
        OSError: storage failed.
    """
    names = [source.field for source in rules.captions if source.part == PARQUET]
    if not names or not wanted or not shard.format.sidecar_suffix:
        return {}
    match = RowMatch(rules.metadata_keys is MetadataKeys.LAST_PART, is_of_all=True)
    columns: dict[str, dict[str, str]] = {}
    for path in _parquets(shard, joins):
        for name, texts in _texts_of(path, names, sorted(keys), match).items():
            columns[name] = texts | columns.get(name, {})
    found: dict[str, str] = {}
    for name in reversed(names):
        found |= {key: text for key, text in columns.get(name, {}).items() if key in wanted}
    return found


def _parquets(shard: ShardFile, joins: ShardJoins) -> list[Path]:
    own = [] if shard.sidecar_path is None else [shard.sidecar_path]
    joined = [path for path in joins.files if path.suffix == PARQUET_SUFFIX]
    return [*own, *joined, *(path for table in joins.tables for path in table)]


def _texts_of(path: Path, names: Sequence[str], keys: Sequence[str], match: RowMatch) -> dict[str, dict[str, str]]:
    """The texts that some columns of a parquet have for samples: by column, then by key. Raises OSError."""
    try:
        columns = parquet_columns(path, keys, Findings(), match).columns
    except FileNotFoundError:
        return {}
    except (pa.ArrowException, ValueError, OSError) as error:
        if is_of_storage(error):
            raise
        return {}
    texts = {name: zip(keys, columns[name].to_pylist(), strict=True) for name in names if name in columns}
    usable = {name: ((key, usable_caption(value)) for key, value in found) for name, found in texts.items()}
    return {name: {key: text for key, text in found if text is not None} for name, found in usable.items()}
