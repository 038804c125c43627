"""Measuring shards: their samples are looked at once, in processes of their own where there are many."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from dataserver.dataset import (
    Filter,
    Quarantine,
    Shard,
    compile_filter,
    in_processes,
    processes_within,
    usable_cores,
    usable_memory,
)
from dataserver.jobs.once import LOOK_S
from dataserver.planning.gathering import ShardColumns
from dataserver.planning.jobspec import Sizing
from dataserver.planning.measure import Measure, measure_rows
from dataserver.planning.samples import I64

MANY: Final = 256
"""So many shards are worth the second that it takes to start processes."""
MOST_WORKERS: Final = 8
"""Processes."""
WORKER_BYTES: Final = 100 << 20
"""Memory of one. Half of what there is is for them together: the rest is the server's."""
TASK: Final = 16
"""Shards that a process is given at once."""
NICENESS: Final = 10
"""Of the processes of a server: its streams come first."""
_has_processes: Final = threading.Lock()
Progress = Callable[[int, int], object]
"""Called with (shards done, shards in total)."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Which samples of a shard are kept, and how they are sized: all that a measure depends on beside the shard."""

    tokenizer_digest: str
    sizing: Sizing
    filter: str = ""
    quarantine: Quarantine | None = None

    def key(self) -> list[Any]:
        """What tells rules apart; the quality of decoding changes no size."""
        grid = [self.sizing.patch, self.sizing.merge, self.sizing.max_patches]
        return [self.tokenizer_digest, *grid, self.filter, self.quarantine.digest if self.quarantine else ""]


def measure_shards(
    shards: Sequence[Shard],
    rules: Rules,
    progress: Progress = lambda _done, _total: None,
    look: Callable[[], object] = lambda: None,
    workers: int | None = None,
    niceness: int = NICENESS,
) -> list[Measure]:
    """Look at the samples of some shards.

    Args:
        shards: of one dataset.
        rules: what is kept, and how it is sized.
        progress: told how far it is.
        look: called often; what it raises ends the work.
        workers: processes; by default one for each core, a few at most, and no more than there is memory for.
        niceness: by how much these give way to others.

    Raises:
        TokensMissingError: a shard is not counted for the tokenizer; names the command.
        DatasetError: an index cannot be read.
    """
    progress(0, len(shards))
    size = TASK if _in_processes(len(shards), workers) else 1
    tasks = [shards[i : i + size] for i in range(0, len(shards), size)]
    parts: dict[int, list[Measure]] = {}
    done = 0
    for position, measures in measure_tasks(tasks, rules, look, workers, niceness):
        parts[position] = measures
        done += len(measures)
        progress(done, len(shards))
    return [measure for position in range(len(tasks)) for measure in parts[position]]


def measure_tasks(
    tasks: Sequence[Sequence[Shard]],
    rules: Rules,
    look: Callable[[], object] = lambda: None,
    workers: int | None = None,
    niceness: int = NICENESS,
) -> Iterator[tuple[int, list[Measure]]]:
    """Yield the position of each task and the measures of its shards, as they are done; else as `measure_shards`."""
    if _in_processes(sum(map(len, tasks)), workers):
        cores = min(MOST_WORKERS, usable_cores(), processes_within(2 * WORKER_BYTES, usable_memory()))
        reduced = [(shards, _reduced(rules, shards)) for shards in tasks]
        with _turn(look):
            yield from in_processes(_measure_all, reduced, workers or cores, look, niceness)
        return
    keep = compile_filter(rules.filter) if rules.filter else None
    for position, shards in enumerate(tasks):
        found = []
        for shard in shards:
            look()
            found.append(_measure(shard, rules, keep))
        yield position, found


@contextmanager
def _turn(look: Callable[[], object]) -> Iterator[None]:
    """Wait until no other measure has processes: those of one take all cores, and of several too much memory."""
    while not _has_processes.acquire(timeout=LOOK_S):
        look()
    try:
        yield
    finally:
        _has_processes.release()


def _in_processes(num_shards: int, workers: int | None) -> bool:
    return num_shards >= MANY and workers != 1


def kept_rows(shard: Shard, keep: Filter | None, quarantine: Quarantine | None) -> I64:
    """The rows of a shard that filter and quarantine leave. int64 [k]."""
    if keep is None and quarantine is None:
        return _all_rows(shard.num_samples)
    return np.flatnonzero(shard.keep(keep, quarantine))


@lru_cache(maxsize=16)
def _all_rows(count: int) -> I64:
    """What shards of as many samples share, of which none is left out. int64 [count], read-only."""
    rows = np.arange(count)
    rows.setflags(write=False)
    return rows


def columns_of(shard: Shard, tokenizer_digest: str) -> ShardColumns:
    """What the index and the token counts say of all samples of a shard.

    Raises:
        TokensMissingError: the shard is not counted for the tokenizer; names the command.
    """
    sizes = shard.sizes()
    return ShardColumns(
        text_offsets=sizes.text_offsets,
        text_tokens=shard.token_counts(tokenizer_digest),
        image_offsets=sizes.image_offsets,
        image_width=sizes.image_width,
        image_height=sizes.image_height,
    )


def _measure_all(task: tuple[Sequence[Shard], Rules]) -> list[Measure]:
    shards, rules = task
    keep = compile_filter(rules.filter) if rules.filter else None
    return [_measure(shard, rules, keep) for shard in shards]


def _measure(shard: Shard, rules: Rules, keep: Filter | None) -> Measure:
    row = kept_rows(shard, keep, rules.quarantine)
    return measure_rows(rules.sizing, columns_of(shard, rules.tokenizer_digest), row)


def _reduced(rules: Rules, shards: Sequence[Shard]) -> Rules:
    """The rules with as much of the quarantine list as some shards need."""
    if rules.quarantine is None:
        return rules
    listed = rules.quarantine.keys
    some = Quarantine({shard.name: listed[shard.name] for shard in shards if shard.name in listed})
    return Rules(rules.tokenizer_digest, rules.sizing, rules.filter, some)
