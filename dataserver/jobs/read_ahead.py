"""What a job will read from a store, told to the cache of blocks before it is wanted."""

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from dataserver.dataset import BLOCKS, BlockKey, Blocks, DatasetError, IoThreads, Source
from dataserver.planning.stream.order import StreamOrder

LATE: Final = 8
"""Steps that ranks may be behind each other: a step further back is one that a trainer begins with anew."""

_log = logging.getLogger(__name__)
_threads: Final = IoThreads(1, "needs")


class Stored(Protocol):
    """What is known of a dataset here."""

    @property
    def reads_ahead(self) -> bool:
        """As `Dataset.reads_ahead`."""

    def blocks(self, shard: int, low: int, high: int) -> Iterable[tuple[BlockKey, Source]]:
        """As `Dataset.blocks`."""


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
        self._step = -1

    def reach(self, step: int) -> None:
        """Note that the images of a step are read; what it and the next ones need is begun in a thread."""
        if not self._is_remote:
            return
        with self._lock:
            if self._step - LATE <= step <= self._step:
                return
            self._step = step
        _threads.submit(self._tell_latest)

    def tell(self, step: int) -> None:
        """Tell the cache what a step and the next ones need."""
        found = dict[BlockKey, Source]()
        for stretch in self._order.needed(step):
            dataset = self._datasets[stretch.dataset]
            if dataset.reads_ahead:
                found.update(dataset.blocks(stretch.shard, stretch.low, stretch.high))
        self._blocks.need(self._job_id, found)

    def _tell_latest(self) -> None:
        try:
            self.tell(self._step)
        except (OSError, DatasetError) as error:  # who reads the images is told
            _log.debug("nothing is read ahead for job %s: %s", self._job_id, error)
        except Exception:  # nobody asks for what came of it
            _log.exception("nothing is read ahead for job %s", self._job_id)
