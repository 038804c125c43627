"""Building indexes: one sequential pass per shard, in spawned processes, only where the index is missing or stale.

A shard that is not known to be as it was indexed is read to find that out.

Each index is complete or absent, so a build that was killed continues by being run again.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dataserver.dataset.errors import DatasetError, StaleIndexError
from dataserver.dataset.index.format import read_findings
from dataserver.dataset.index.fresh import read_fresh_index, read_index
from dataserver.dataset.index.known import state_of, write_known
from dataserver.dataset.index.numeric import has_numeric, write_numeric
from dataserver.dataset.index.summary import Summary, write_summary
from dataserver.dataset.machine.cores import usable_cores
from dataserver.dataset.machine.memory import processes_within, usable_memory
from dataserver.dataset.machine.workers import in_processes
from dataserver.dataset.shards.listing import ShardFile, index_folder, list_shards

_log = logging.getLogger(__name__)

WORKER_BYTES: Final = 160 << 20
"""What a process takes that indexes shards of 10,000 samples."""
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build found: `num_built` of `num_shards` were indexed now, the others were fresh."""

    num_shards: int
    num_built: int
    num_samples: int
    num_bytes: int
    findings: Mapping[str, int]
    """Counts by kind over all shards."""


def build_index(
    path: Path, index_dir: Path | None = None, workers: int | None = None, progress: Progress | None = None
) -> BuildReport:
    """Index every shard at `path` whose index is missing or stale.

    Args:
        path: folder of shards, or one shard.
        index_dir: where indexes go instead of beside the shards, under the same relative paths.
        workers: number of processes; by default one for each usable core that there is memory for. One works in this
            process.
        progress: called as shards finish.

    Raises:
        DatasetError: there is no shard, or one cannot be read or its index not written.
    """
    if workers is not None and workers < 1:
        raise DatasetError(f"workers is {workers}; give at least 1")
    listing = list_shards(path, index_dir)
    listing.warn_of_links()
    shards = listing.shards
    sizes = {shard.name: shard.storage.etag(str(shard.path)).num_bytes for shard in shards}
    summary = Summary.read(index_folder(shards[0]))
    stale = [shard for shard in shards if not _is_known(shard, summary)]
    total = sum(sizes.values())
    num_built = 0
    done = total - sum(sizes[shard.name] for shard in stale)

    problems: list[str] = []

    def advance(shard: ShardFile, built: bool, problem: str) -> None:
        nonlocal done, num_built
        done += sizes[shard.name]
        num_built += built
        if problem:
            problems.append(problem)
        if progress is not None:
            progress(done, total)

    if progress is not None:
        progress(done, total)
    num_workers = min(workers or min(usable_cores(), processes_within(WORKER_BYTES, usable_memory())), len(stale))
    if num_workers <= 1:
        for shard in stale:
            advance(shard, *_refresh(shard))
    else:
        for position, found in in_processes(_refresh, stale, num_workers):
            advance(stale[position], *found)
    if problems:
        _log.warning("%s; servers read %d shards more slowly without such files", problems[0], len(problems))
    contents = [(shard.name, read_index(shard, summary).content) for shard in shards]
    if path.is_dir() and not summary.holds(contents):
        write_summary(index_folder(shards[0]), contents)
    return _report(shards, num_built, sum(content.header.num_samples for _, content in contents), total)


def _is_known(shard: ShardFile, summary: Summary) -> bool:
    """Say whether a shard has all files of its index and is known to be as it was indexed."""
    try:
        found = read_index(shard, summary)
        return found.is_known and has_numeric(shard.index_path, found.content.header)
    except StaleIndexError:
        return False


def _refresh(shard: ShardFile) -> tuple[bool, str]:
    """Index a shard, unless its index describes its content; then note that, so that nobody compares them again.

    Returns:
        Whether it was indexed, and why a file beside the index was not written, where that is impossible.
    """
    problem = ""
    try:
        indexed = read_fresh_index(shard)
        if not has_numeric(shard.index_path, indexed.header):  # of an earlier release, cut short, or removed
            problem = write_numeric(shard.index_path, indexed.header)
        if indexed.etags == shard.etags():
            return False, problem or write_known(shard.index_path, indexed.header, state_of(indexed.etags))
    except StaleIndexError:
        pass
    from dataserver.dataset.index.indexing import index_shard  # with parquet, which servers do without

    return True, index_shard(shard)


def _report(shards: Sequence[ShardFile], num_built: int, num_samples: int, num_bytes: int) -> BuildReport:
    counts: Counter[str] = Counter()
    for shard in shards:
        counts.update(read_findings(shard.index_path).counts)
    return BuildReport(len(shards), num_built, num_samples, num_bytes, dict(sorted(counts.items())))
