"""Indexing one shard again where its index is missing or does not describe it: what a build shares out."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from dataserver.dataset.errors import StaleIndexError
from dataserver.dataset.index.external_files import are_as_indexed
from dataserver.dataset.index.format import IndexHeader, atomic_writer, lacks_formats
from dataserver.dataset.index.fresh import IndexedShard, read_fresh_index, read_index
from dataserver.dataset.index.joins import ShardJoins, are_as_joined
from dataserver.dataset.index.known import state_of, write_known
from dataserver.dataset.index.numeric import has_numeric, write_numeric
from dataserver.dataset.index.pending import BESIDE
from dataserver.dataset.index.rules import IndexRules, LoneTexts, lone_texts_of, written_rules
from dataserver.dataset.shards.listing import INDEX_SUFFIX, ShardFile

Task = tuple[ShardFile, ShardFile, IndexRules, LoneTexts | None, ShardJoins]
"""A shard with the index that it has, the same with the one that it gets, and what decides that."""


class Made(NamedTuple):
    """What became of a task."""

    is_new: bool
    """Whether the shard was indexed."""
    problem: str
    """Why a file beside the index was not written, where that is impossible."""
    files: Mapping[str, bytes] = {}
    """The index and what lies beside it, by suffix, where they were written on another machine."""


def refresh(task: Task) -> Made:
    """Index a shard, unless its index describes its content; then note that, so that nobody compares them again."""
    shard, target, rules, lone_texts, joins = task
    indexed = _indexed(target)
    if indexed is not None and _is_wanted(task, indexed) and indexed.etags == shard.etags():
        problem = _with_numeric(target, indexed)
        return Made(False, problem or write_known(target.index_path, indexed.header, state_of(indexed.etags)))
    from dataserver.dataset.index.indexing import index_shard  # with parquet, which servers do without

    return Made(True, index_shard(target, rules, lone_texts, indexed or _indexed(shard), joins))


def refresh_unread(task: Task) -> Made | None:
    """As `refresh`, where the shard is known to be as it was indexed; None where it has to be read."""
    try:
        indexed = read_index(task[1], any_rules=True)
    except StaleIndexError:
        return None
    return Made(False, _with_numeric(task[1], indexed)) if indexed.is_known and _is_wanted(task, indexed) else None


def refresh_elsewhere(task: Task) -> Made:
    """Index a shard on a machine that does not have the folder of the indexes; they come back for `write_made`."""
    _, target, rules, lone_texts, joins = task
    with TemporaryDirectory(prefix="disttrain-") as folder:
        here = replace(target, index_dir=Path(folder))
        made = refresh((here, here, rules, lone_texts, joins))
        paths = {suffix: here.index_path.with_suffix(suffix) for suffix in (INDEX_SUFFIX, *BESIDE)}
        return made._replace(files={suffix: path.read_bytes() for suffix, path in paths.items() if path.exists()})


def write_made(made: Made, target: ShardFile) -> None:
    """Write what another machine made to where it belongs. Raises DatasetError where that is impossible.

    An index comes first: what lies beside it is of another one then, and that shows.
    """
    for suffix in (INDEX_SUFFIX, *BESIDE):
        path = target.index_path.with_suffix(suffix)
        if suffix in made.files:
            with atomic_writer(path) as temp:
                temp.write_bytes(made.files[suffix])
        else:
            path.unlink(missing_ok=True)


def is_current(shard: ShardFile, header: IndexHeader, rules: IndexRules, joins: ShardJoins) -> bool:
    """Whether an index, made by the same rules, is what would be made now of other files than the shard."""
    as_indexed = are_as_joined(shard, header, joins) and are_as_indexed(shard, header, rules)
    return as_indexed and not lacks_formats(shard.index_path)


def _is_wanted(task: Task, indexed: IndexedShard) -> bool:
    """Whether the index that a task would make is there already, if the shard has not changed."""
    _, target, rules, lone_texts, joins = task
    wanted = written_rules(lone_texts or lone_texts_of(rules, indexed.header.has_images), rules)
    return indexed.header.rules == wanted and is_current(target, indexed.header, rules, joins)


def _with_numeric(shard: ShardFile, indexed: IndexedShard) -> str:
    """Write the numeric columns where they were cut short, or removed; why not, where that is impossible."""
    path, header = shard.index_path, indexed.header
    return "" if has_numeric(path, header) else write_numeric(path, header)


def _indexed(shard: ShardFile) -> IndexedShard | None:
    """The index of a shard, by any rules, if it describes the content."""
    try:
        return read_fresh_index(shard, any_rules=True)
    except StaleIndexError:
        return None
