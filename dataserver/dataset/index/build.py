"""Building indexes: one sequential pass per shard, in spawned processes, only where the index is missing or stale.

A shard that is not known to be as it was indexed is read to find that out.

Each index is complete or absent, so a build that was killed continues by being run again.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dataserver.dataset.energon import field_captions
from dataserver.dataset.errors import CaptionError, DatasetError, ShardReadError, StaleIndexError
from dataserver.dataset.index.copies import allow_copies, check_copies
from dataserver.dataset.index.dataset_findings import dataset_findings
from dataserver.dataset.index.flags import command_of, flags_of, write_flags
from dataserver.dataset.index.format import IndexHeader, read_findings
from dataserver.dataset.index.fresh import read_index
from dataserver.dataset.index.join_findings import note_join_findings
from dataserver.dataset.index.joins import Joins, ShardJoins, State, find_joins
from dataserver.dataset.index.numeric import has_numeric
from dataserver.dataset.index.parts import WHOLE, Part
from dataserver.dataset.index.pending import PendingIndexes
from dataserver.dataset.index.refreshing import (
    Made,
    Task,
    is_current,
    refresh,
    refresh_elsewhere,
    refresh_unread,
    write_made,
)
from dataserver.dataset.index.rules import DEFAULT_RULES, IndexRules, LoneTexts, lone_texts_of, written_rules
from dataserver.dataset.index.sets import add_set
from dataserver.dataset.index.summary import IndexContent, Summary, write_summary
from dataserver.dataset.machine.cores import usable_cores
from dataserver.dataset.machine.memory import processes_within, usable_memory
from dataserver.dataset.machine.workers import Engine, LostWorkerError, shared_out
from dataserver.dataset.progress import Progress, untold
from dataserver.dataset.shards.captions import PARQUET
from dataserver.dataset.shards.listing import Listing, ShardFile, index_folder, list_shards
from dataserver.dataset.storage.blocks import DEFAULT_MEMORY_BYTES
from dataserver.dataset.storage.index_mirror import pull
from dataserver.dataset.storage.urls import Url, is_url, location

_log = logging.getLogger(__name__)

WORKER_BYTES: Final = 160 << 20
"""Memory of a process that indexes shards of 10,000 samples."""
Indexed = Callable[[Path], object]
"""Called with the folder that the shards lie in."""


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build found: `num_built` of `num_shards` were indexed now, the others were fresh."""

    num_shards: int
    num_built: int
    num_samples: int
    num_bytes: int
    findings: Mapping[str, int]
    """Counts by kind over all shards."""
    is_folder: bool
    """Whether a folder was indexed, and not a shard."""
    root: Path
    """The folder that the shards lie in."""


def build_index(
    path: Path,
    index_dir: Path | None = None,
    workers: int | None = None,
    progress: Progress = untold,
    rules: IndexRules = DEFAULT_RULES,
    part: Part = WHOLE,
    engine: Engine | None = None,
    indexed: Indexed | None = None,
) -> BuildReport:
    """Index every shard at `path` whose index is missing, stale, or made by other rules.

    Args:
        path: folder of shards, or one shard.
        index_dir: where indexes go instead of beside the shards, under the same relative paths.
        workers: number of processes; by default one for each usable core that there is memory for. One works in this
            process.
        progress: called with (bytes done, bytes in total) as shards finish.
        rules: what decides samples and texts.
        part: shards that are indexed here, while other machines index others. What belongs to the dataset as a whole
            is left to a run over all of them.
        engine: machines that share out the work and see the same files and stores; by default it is done here.
        indexed: called when the index of another shard lies where it belongs, and a killed run would go on from there.

    Raises:
        DatasetError: there is no shard, or one cannot be read or its index not written, or several have the same bytes
            and the rules do not allow it.
    """
    if workers is not None and workers < 1:
        raise DatasetError(f"workers is {workers}; give at least 1")
    path = location(path)
    index_dir = None if index_dir is None else location(index_dir)
    if engine is not None:  # its tasks run in other folders
        path, index_dir = _absolute(path), index_dir and _absolute(index_dir)
        rules = replace(rules, images_root=rules.images_root and rules.images_root.absolute())
    listing = list_shards(path, index_dir)
    listing.warn_of_links()
    pull(listing.shards[0].root, index_dir)
    rules = with_fields(listing.shards[0].root, rules)
    joins = find_joins(listing.shards[0].root, listing.shards, rules.joins)
    folder = index_folder(listing.shards[0])
    summary = Summary.read(folder)
    summary.warn_of_gone(listing)
    listing = replace(listing, shards=part.of(listing.shards))
    shards = listing.shards
    headers = {shard.name: header for shard in shards if (header := _known_header(shard, summary)) is not None}
    pending = PendingIndexes(folder)
    run = _Run(shards, joins, workers, progress, pending if len(headers) == len(shards) else None, engine, indexed)
    try:
        contents = run.refresh_all(rules, headers, summary)
        by_name = [(name, content.header) for name, content in contents]
        if part == WHOLE:
            _check_captions(path, rules, [content for _, content in contents])
            check_copies(path, by_name, rules.allow_duplicates, command_of(shards[0], flags_of(rules)))
            if listing.is_folder:
                note_join_findings(folder, run.indexes, by_name, joins, rules)
    except (ShardReadError, LostWorkerError):  # the command that is run again continues with what was made
        raise
    except DatasetError:
        pending.discard(shards)
        raise
    run.finish()
    pending.discard(shards)  # what a killed run left behind
    if part != WHOLE:
        return _report(replace(listing, unread=(), is_folder=False), contents, run)
    if listing.is_folder:  # else these are about one shard of those that the folder may have
        if not summary.holds(contents):
            write_summary(folder, contents)
        if rules.allow_duplicates:
            allow_copies(folder)
        add_set(folder, by_name)
        write_flags(folder, rules)
    return _report(listing, contents, run)


def _worker_bytes(shard: ShardFile) -> int:
    """Memory of a process that indexes shards like this: of Parquet in a store it holds blocks as well."""
    holds_blocks = shard.format.reads_parts and not shard.storage.is_local
    return WORKER_BYTES + (DEFAULT_MEMORY_BYTES if holds_blocks else 0)


def _absolute(path: Path) -> Path:
    return path if isinstance(path, Url) else path.absolute()


def with_fields(root: Path, rules: IndexRules) -> IndexRules:
    """Return rules with the fields that an Energon-prepared folder names, where the user chose none of these."""
    captions, images = field_captions(root)
    return replace(rules, captions=rules.captions or captions, images=rules.images or images)


def _check_captions(path: Path, rules: IndexRules, contents: Sequence[IndexContent]) -> None:
    """Raise CaptionError if no sample has one of the captions that are asked for."""
    for source in rules.captions:
        if not any(source.column in content.columns for content in contents):
            what = f"{source.part!r}" if source.part == PARQUET else f"member .{source.part}"
            entry = f", {source.field!r}" if source.field else ""
            from dataserver.dataset.shards.sidecar_columns import EXCLUDED  # with Arrow, which servers load late

            unread = source.part == PARQUET and source.field in EXCLUDED
            unread_columns = f"; columns {sorted(EXCLUDED)} beside a tar are not read: rename it" if unread else ""
            if source.part == PARQUET and source.field.endswith("]"):
                unread_columns += "; lists are read in Parquet with images, not in a parquet beside a tar"
            raise CaptionError(
                f"no sample of {path} has the caption {source.name} ({what}{entry}){unread_columns}; correct the "
                "extension of the member, its key, or the column of the parquet files, or leave the caption out"
            )


class _Run:
    """Indexes shards and tells how far it is."""

    def __init__(
        self,
        shards: Sequence[ShardFile],
        joins: Joins,
        workers: int | None,
        progress: Progress,
        pending: PendingIndexes | None,
        engine: Engine | None,
        indexed: Indexed | None,
    ) -> None:
        """Prepare to index shards; indexes wait in `pending`, if there is one, until `finish`."""
        self._shards = shards
        self._joins = joins
        self._table_state: State = joins.table_state()
        self._pending = pending
        self._sizes = {shard.name: (shard.listed or shard.etags())[0].num_bytes for shard in shards}
        if engine is None:
            most = min(usable_cores(), processes_within(_worker_bytes(shards[0]), usable_memory()))
        else:
            most = engine.num_workers
        self._workers = workers or most
        self._engine = engine
        self._progress = progress
        self._indexed = indexed
        self._problems: list[str] = []
        self._built: set[str] = set()
        self._targets: dict[str, ShardFile] = {}
        """By name: the shards that were looked at, with where their new indexes are."""

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def num_built(self) -> int:
        return len(self._built)

    @property
    def indexes(self) -> list[ShardFile]:
        """All shards, each with where its index is until `finish`."""
        return [self._targets.get(shard.name, shard) for shard in self._shards]

    def refresh_all(
        self, rules: IndexRules, headers: Mapping[str, IndexHeader], summary: Summary
    ) -> list[tuple[str, IndexContent]]:
        """Index shards that are not known to be indexed by these rules; return the contents of all indexes, by name.

        Args:
            rules: what decides samples and texts.
            headers: of the shards that are known to be as they were indexed.
            summary: of the indexes that the dataset has.
        """
        lone_texts = lone_texts_of(rules, any(header.has_images for header in headers.values()))
        written = written_rules(lone_texts, rules)
        made_so = {
            shard.name
            for shard in self._shards
            if shard.name in headers
            and headers[shard.name].rules == written
            and is_current(shard, headers[shard.name], rules, self._joined_to(shard))
        }
        first = None if lone_texts is LoneTexts.ALONE else lone_texts  # a shard may have the first image
        tasks = []
        for shard in self._shards:
            if shard.name not in made_so:
                tasks.append((shard, self._target(shard)))
            elif not has_numeric(shard.index_path, headers[shard.name]):
                tasks.append((shard, shard))
        self._refresh(tasks, rules, first)
        contents = self._contents(summary)
        lone_texts = lone_texts_of(rules, any(content.header.has_images for _, content in contents))
        wanted = written_rules(lone_texts, rules)
        others = [s for s, (_, content) in zip(self._shards, contents, strict=True) if content.header.rules != wanted]
        if others:  # texts alone, where another shard turned out to have images; or the other way round
            self._refresh([(shard, self._target(shard)) for shard in others], rules, lone_texts)
            contents = self._contents(summary)
        if self._joins.table_state() != self._table_state:
            raise ShardReadError("a joined table changed while it was read; index again when it is complete")
        return contents

    def _joined_to(self, shard: ShardFile) -> ShardJoins:
        return self._joins.of(shard, self._table_state)

    def _target(self, shard: ShardFile) -> ShardFile:
        return shard if self._pending is None else self._pending.of(shard)

    def finish(self) -> None:
        """Publish indexes that wait; log which files beside indexes could not be written."""
        if self._pending is not None:
            self._pending.publish(s for s in self._shards if self._targets.get(s.name, s) != s)
        if self._problems:
            _log.warning(
                "%s; servers read %d shards more slowly without such files", self._problems[0], len(self._problems)
            )

    def _contents(self, summary: Summary) -> list[tuple[str, IndexContent]]:
        pairs = zip(self._shards, self.indexes, strict=True)
        return [(s.name, read_index(at, summary if at == s else None).content) for s, at in pairs]

    def _refresh(
        self, shards: Sequence[tuple[ShardFile, ShardFile]], rules: IndexRules, lone_texts: LoneTexts | None
    ) -> None:
        """Index shards, each given with the index that it has and with the one that it gets."""
        left = sum(self._sizes[shard.name] for shard, _ in shards)
        self._tell(left)
        self._targets |= {shard.name: target for shard, target in shards}
        tasks = [(shard, target, rules, lone_texts, self._joined_to(shard)) for shard, target in shards]
        for position, made in self._done(tasks):
            shard, target = shards[position]
            left -= self._sizes[shard.name]
            if made.files:
                write_made(made, target)
            if made.is_new:
                self._built.add(shard.name)
            if made.problem:
                self._problems.append(made.problem)
            self._tell(left)
            if made.is_new and self._indexed is not None and self._pending is None:
                self._indexed(shard.root)

    def _done(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Made]]:
        """The position of each task and what became of it, as they are done."""
        shard = self._shards[0]
        if self._engine is None or not any(is_url(folder) for folder in (shard.root, shard.index_dir) if folder):
            yield from shared_out(refresh, tasks, self._workers, self._engine)
            return
        left = []  # other machines do not have the folder in which this one mirrors the indexes of a store
        for position, task in enumerate(tasks):
            if (made := refresh_unread(task)) is None:
                left.append(position)
            else:
                yield position, made
        there = shared_out(refresh_elsewhere, [tasks[position] for position in left], self._workers, self._engine)
        yield from ((left[number], made) for number, made in there)

    def _tell(self, left: int) -> None:
        self._progress(self.num_bytes - left, self.num_bytes)


def _known_header(shard: ShardFile, summary: Summary) -> IndexHeader | None:
    """The header of a shard that is known to be as it was indexed."""
    try:
        found = read_index(shard, summary)
        return found.content.header if found.is_known else None
    except StaleIndexError:
        return None


def _report(listing: Listing, contents: Sequence[tuple[str, IndexContent]], run: _Run) -> BuildReport:
    counts: Counter[str] = Counter(finding.kind for finding in dataset_findings(listing, contents))
    for shard in listing.shards:
        counts.update(read_findings(shard.index_path).counts)
    num_samples = sum(content.header.num_samples for _, content in contents)
    found = dict(sorted(counts.items()))
    num_shards, root = len(listing.shards), listing.shards[0].root
    return BuildReport(num_shards, run.num_built, num_samples, run.num_bytes, found, listing.is_folder, root)
