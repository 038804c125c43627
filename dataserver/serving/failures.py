"""What could not be read or decoded lately, by shard and key: a bounded list, the oldest out first."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from time import time
from typing import Final

from dataserver.dataset import Dataset, DatasetError, describe, printable

MAX_FAILURES: Final = 512
"""Failures that are remembered, each of a sample or of a shard."""
MAX_CHARS: Final = 256
"""Most characters of a name, a key or a reason."""


class FailureKind(StrEnum):
    """What kind of work failed."""

    IMAGE = "image"
    """An image or clip cannot be made from its stored bytes: its sample is invalid."""
    READ = "read"
    """Storage did not give the bytes of a shard, at one of the tries."""
    TEXT = "text"
    """The token ids of a sample cannot be read, or are not those that were counted."""


@dataclass(slots=True)
class _Failure:
    dataset: Dataset
    count: int = 0
    last: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure that is remembered."""

    kind: FailureKind
    dataset: str
    shard: str
    key: str
    """Key of the sample; empty where a shard could not be read."""
    count: int
    last: float
    """When it failed last, in seconds since 1970."""
    reason: str


class Failures:
    """The failures of one server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[FailureKind, str, int, int], _Failure] = OrderedDict()
        """By kind, name of the dataset, position of the shard, and row of the sample or -1; the newest comes last."""
        self._forgotten = 0

    def note(self, kind: FailureKind, name: str, dataset: Dataset, shard: int, row: int, reason: str) -> None:
        """Remember a failure, or that it happened once more.

        Args:
            kind: what failed.
            name: of the dataset.
            dataset: itself.
            shard: position among its shards.
            row: of the sample; -1 where it is not known.
            reason: in words, without the places of this machine.
        """
        with self._lock:
            found = self._found.setdefault((kind, name, shard, row), _Failure(dataset))
            found.count, found.last, found.reason = found.count + 1, time(), printable(reason, MAX_CHARS)
            self._found.move_to_end((kind, name, shard, row))
            if len(self._found) > MAX_FAILURES:
                self._found.popitem(last=False)
                self._forgotten += 1

    @property
    def num_forgotten(self) -> int:
        """Failures that are no longer in the list."""
        return self._forgotten

    def listed(self, datasets: Mapping[str, Dataset]) -> Iterator[Failure]:
        """Those of some datasets, the newest first. Keys are looked up in the index now."""
        with self._lock:
            noted = [(where, replace(failure)) for where, failure in self._found.items()]
        may = set(datasets)
        for (kind, name, shard, row), found in reversed(noted):
            if name in may:
                file = printable(found.dataset.shards[shard].name, MAX_CHARS)
                key = printable(_key(found.dataset, shard, row), MAX_CHARS)
                yield Failure(kind, name, file, key, found.count, found.last, found.reason)


def _key(dataset: Dataset, shard: int, row: int) -> str:
    """The key of a sample; its row where the index cannot be read any more."""
    if row < 0:
        return ""
    try:
        return next(describe(dataset, [(shard, row)]))[1].key
    except (DatasetError, OSError):
        return f"row {row}"
