"""What a job will read from a store, told to the cache of blocks before it is wanted."""

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from time import monotonic
from typing import Final, Protocol

from dataserver.dataset import BLOCKS, NEEDED_S, BlockKey, Blocks, DatasetError, IoThreads, Source
from dataserver.planning.stream.axis import Stretch
from dataserver.planning.stream.order import StreamOrder
from dataserver.tracing import within

LATE: Final = 8
"""Steps that ranks may be behind each other: a step further back is one of another reader."""
READERS: Final = 4
"""Readers of a job that are followed at a time, each more than `LATE` steps from the others."""
AGAIN_S: Final = NEEDED_S / 4
"""What a job needs is told again so often where its step stays the same."""

_log = logging.getLogger(__name__)
_threads: Final = IoThreads(8, "needs")
"""Each job uses one at a time: a store that does not answer stops the jobs that read from it."""


class Stored(Protocol):
    """What is known of a dataset here."""

    @property
    def reads_ahead(self) -> bool:
        """Whether blocks of the dataset are read ahead."""

    def blocks(self, shard: int, low: int, high: int) -> Iterable[tuple[BlockKey, Source]]:
        """Return the blocks that hold a part of a shard, as `Dataset.blocks` does."""


@dataclass(slots=True)
class _Reader:
    """A trainer, or several that are about as far."""

    step: int
    """The furthest that one of its ranks reads."""
    read_at: float
    """When it read last, on the monotonic clock."""


class ReadAhead:
    """Follows the steps of one job. Thread-safe."""

    def __init__(self, job_id: str, order: StreamOrder, datasets: Sequence[Stored], blocks: Blocks = BLOCKS) -> None:
        """Follow a job.

        Args:
            job_id: the job's.
            order: its order.
            datasets: the open datasets, in the order of the job's list.
            blocks: the cache.
        """
        self._job_id = job_id
        self._order = order
        self._datasets = datasets
        self._blocks = blocks
        self._is_remote = any(dataset.reads_ahead for dataset in datasets)
        self._lock = threading.Lock()
        self._readers: list[_Reader] = []
        self._tell_at = 0.0
        """When the cache is to be told next, on the monotonic clock."""
        self._is_telling = False
        self._has_failed = False

    def reach(self, step: int) -> None:
        """Note that the images of a step are read; what it and the next ones need is begun in a thread."""
        if not self._is_remote:
            return
        with self._lock:
            now = monotonic()
            if self._moves(step, now):
                self._tell_at = now
            self._begin_telling(now)

    def tell(self, *steps: int) -> None:
        """Tell the cache what steps and the ones soon after each need, and what ranks need that are behind.

        The latter is held where it is in the cache, and not read: it was when the first rank needed it, and went since.
        """
        ahead = [part for step in steps for part in self._parts(self._order.needed(step, step))]
        behind = [part for step in steps for part in self._parts(self._behind(step))]
        self._blocks.need(self._job_id, self._in_turn(ahead), self._in_turn(behind))

    def _moves(self, step: int, now: float) -> bool:
        """Note a step. Returns whether a reader goes on to it."""
        self._readers = [reader for reader in self._readers if reader.read_at > now - NEEDED_S]
        reader = next((reader for reader in self._readers if abs(step - reader.step) <= LATE), None)
        if reader is None:
            recent = sorted(self._readers, key=lambda reader: reader.read_at)[1 - READERS :]
            self._readers = [reader for reader in self._readers if reader in recent]
            self._readers.append(_Reader(step, now))
            return True
        reader.read_at = now
        moves = step > reader.step
        reader.step = max(step, reader.step)
        return moves

    def _begin_telling(self, now: float) -> None:
        if self._tell_at <= now and not self._is_telling:
            self._tell_at = now + AGAIN_S
            with within(None):  # it is for steps to come
                self._is_telling = not _threads.submit(self._tell_latest).cancelled()

    def _tell_latest(self) -> None:
        with self._lock:
            steps = [reader.step for reader in self._readers]
        try:
            self.tell(*steps)
        except Exception:  # nobody asks for what came of it
            _log.exception("nothing is read ahead for job %s", self._job_id)
        finally:
            with self._lock:
                self._is_telling = False
                self._begin_telling(monotonic())

    def _behind(self, step: int) -> Iterable[Stretch]:
        """What the steps before one may read. What is needed last comes first: where room is short, that still fits."""
        return reversed(self._order.needed(max(self._order.first_step, step - LATE), step))

    def _parts(self, stretches: Iterable[Stretch]) -> Iterable[Sequence[Stretch]]:
        """The stretches of each dataset that is read ahead."""
        parts: dict[int, dict[Stretch, None]] = {}
        for stretch in stretches:
            if self._datasets[stretch.dataset].reads_ahead:
                parts.setdefault(stretch.dataset, {})[stretch] = None
        return map(tuple, parts.values())

    def _in_turn(self, parts: Sequence[Sequence[Stretch]]) -> Iterator[tuple[BlockKey, Source]]:
        """The first block of each part, the second of each, and so on."""
        for found in zip_longest(*map(self._blocks_of, parts)):
            yield from (one for one in found if one is not None)

    def _blocks_of(self, stretches: Iterable[Stretch]) -> Iterator[tuple[BlockKey, Source]]:
        for stretch in stretches:
            if not self._is_wanted():
                return
            yield from self._stretch(stretch)

    def _is_wanted(self) -> bool:
        """Whether the process goes on and somebody reads."""
        read_at = max((reader.read_at for reader in self._readers), default=inf)
        return threading.main_thread().is_alive() and read_at > monotonic() - NEEDED_S

    def _stretch(self, stretch: Stretch) -> Iterable[tuple[BlockKey, Source]]:
        try:
            return self._datasets[stretch.dataset].blocks(stretch.shard, stretch.low, stretch.high)
        except (OSError, DatasetError) as error:  # who reads the images is told
            level = logging.DEBUG if self._has_failed else logging.WARNING
            self._has_failed = True
            _log.log(
                level,
                "job %s: shard %d of dataset %d is not read ahead: %s",
                *(self._job_id, stretch.shard, stretch.dataset, error),
            )
            return ()
