"""Statistics of datasets: computed once, cached on disk, and never by two threads at a time.

`dataserver index` leaves those for each tokenizer and the default sizing beside the indexes. What a job asks for
besides, a filter or another sizing, each server computes itself and caches in its cache folder. A file has the
statistics of each shard with what identifies that shard's content, so that those of a dataset that has grown are
computed where it is new.
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from dataserver.dataset import Array, ArraysError, Dataset, DatasetError, Progress, Shard, read_arrays, write_arrays
from dataserver.jobs.errors import StatisticsPendingError
from dataserver.jobs.memory_usage import memory_of
from dataserver.jobs.scheduler import IsCancelled, WorkCancelledError, never_cancelled
from dataserver.jobs.shard_statistics import Rules, compute_statistics
from dataserver.jobs.single_flight import LOOK_S, SingleFlightCache
from dataserver.planning import I64
from dataserver.planning.stream.statistics import Lists, ShardStatistics, join_statistics

STATISTICS_VERSION: Final = 2
"""Changes with what is computed and with how it is stored."""
CACHED_BYTES: Final = 64 << 20
"""Most memory that cached statistics take; those used last stay in any case. 10,000 shards take 40 MB at most."""
STORED_FROM_S: Final = 0.5
"""What takes less is neither stored on disk nor worth a line in the log."""
STORED_FILES: Final = 256
"""Most files in a cache folder; those used longest ago go first."""
FORGOTTEN_S: Final = 60.0
"""What nobody has asked for so long is not computed to its end."""

_log = logging.getLogger(__name__)


class StatisticsCache:
    """The statistics of all datasets of a server. Thread-safe."""

    def __init__(self, folder: Path | None = None) -> None:
        """Make a cache with nothing in memory, over a folder; only in memory by default."""
        self._folder = folder
        self._lock = threading.Lock()
        self._pending: dict[str, _Pending] = {}
        self._cached = SingleFlightCache[str, ShardStatistics](CACHED_BYTES, memory_of)
        self._warned = False

    def get(
        self, dataset: Dataset, rules: Rules, cancelled: IsCancelled = never_cancelled, patience_s: float = float("inf")
    ) -> ShardStatistics:
        """The statistics of all shards of a dataset.

        Args:
            dataset: the dataset.
            rules: which of its samples count, and how they are sized.
            cancelled: whether this caller no longer waits.
            patience_s: time after which it does not want to wait any longer; they are computed all the same.

        Raises:
            StatisticsPendingError: it takes longer than that; says how far it is.
            WorkCancelledError: this caller no longer waits.
            TokensMissingError, DatasetError: as `compute_statistics`.
        """
        key = _key(dataset, rules)
        give_up = time.monotonic() + patience_s
        while (found := self._cached.find(key)) is None:
            with self._lock:
                pending = self._pending.get(key)
                if pending is None:
                    pending = self._pending[key] = _Pending()
                    work = (key, pending, dataset, rules)
                    threading.Thread(target=self._compute, args=work, name="statistics", daemon=True).start()
            pending.asked = time.monotonic()
            with contextlib.suppress(TimeoutError):
                return pending.result.result(LOOK_S)
            if cancelled():
                raise WorkCancelledError
            if time.monotonic() > give_up:
                why = "which a new filter, quarantine list, sizing or tokenizer takes once; ask again"
                raise StatisticsPendingError(f"{pending.progress()}, {why}")
        return found

    def _compute(self, key: str, pending: "_Pending", dataset: Dataset, rules: Rules) -> None:
        try:
            statistics = self._read_or_computed(key, pending, dataset, rules)
            self._cached.put(key, statistics)  # before it counts as computed: whoever comes in between finds it
        except BaseException as error:
            with self._lock:
                del self._pending[key]
            pending.result.set_exception(error)
            return
        with self._lock:
            del self._pending[key]
        pending.result.set_result(statistics)

    def _read_or_computed(self, key: str, pending: "_Pending", dataset: Dataset, rules: Rules) -> ShardStatistics:
        path = None if self._folder is None else self._folder / f"statistics-{key[:32]}"
        files = [beside_indexes(dataset, rules)] if _is_plain(rules) else []
        stored = read_stored([*files, *([path] if path else [])], dataset, rules)
        missing = stored.missing(dataset)
        statistics = stored.merged(compute_statistics(missing, rules, pending.tell, pending.look))
        if missing and (spent_s := pending.spent_s) > STORED_FROM_S:
            _log.info(
                "computed the statistics of %d of %d shards of a dataset in %.1f s",
                *(len(missing), len(statistics), spent_s),
            )
            if path is not None:
                self._store(path, statistics, dataset, rules)
        return statistics

    def _store(self, path: Path, statistics: ShardStatistics, dataset: Dataset, rules: Rules) -> None:
        try:
            store(path, statistics, dataset, rules)
        except DatasetError as error:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "statistics of datasets cannot be cached in %s (%s): make room there, or name another folder with "
                    "--cache-dir; until then they are computed again",
                    *(path.parent, error.__cause__ or error),
                )
            return
        with contextlib.suppress(OSError):
            files = sorted(path.parent.glob("statistics-*"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
            for old in files[STORED_FILES:]:
                old.unlink()


class _Pending:
    """Statistics that are being computed, while somebody asks for them."""

    def __init__(self) -> None:
        self.result = Future[ShardStatistics]()
        self.asked = self._began = time.monotonic()
        """Time at which somebody asked last."""
        self._done = self._total = 0

    def look(self) -> None:
        """End the work, by a WorkCancelledError, if nobody asks any more, or the process ends."""
        if time.monotonic() - self.asked > FORGOTTEN_S or not threading.main_thread().is_alive():
            raise WorkCancelledError

    def tell(self, done: int, total: int) -> None:
        """Note how far it is."""
        self._done, self._total = done, total

    @property
    def spent_s(self) -> float:
        """Seconds since it was begun."""
        return time.monotonic() - self._began

    def progress(self) -> str:
        """How far it is, for people."""
        done, spent = self._done, self.spent_s
        left = f" (about {spent / done * (self._total - done):.0f} s left)" if done else ""
        return f"the statistics of {done:,} of {self._total:,} shards are computed{left}"


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """What a file says of the shards of a dataset."""

    statistics: ShardStatistics | None
    """Statistics of all shards in the file; None without a file."""
    row: I64
    """int64 [shards]: where the file has each shard of the dataset, or -1."""

    @property
    def count(self) -> int:
        """Shards of the dataset that the file has."""
        return int((self.row >= 0).sum())

    @property
    def is_exact(self) -> bool:
        """Whether the file has all shards of the dataset, in their order, and no others."""
        return self.statistics is not None and np.array_equal(self.row, np.arange(len(self.statistics)))

    def missing(self, dataset: Dataset) -> list[Shard]:
        """The shards that it does not have."""
        return [shard for shard, row in zip(dataset.shards, self.row.tolist(), strict=True) if row < 0]

    def merged(self, computed: Sequence[ShardStatistics]) -> ShardStatistics:
        """The statistics of all shards, from those of the missing ones."""
        if self.statistics is None:
            return join_statistics(computed)
        if self.is_exact:
            return self.statistics
        order = np.concatenate([np.flatnonzero(self.row >= 0), np.flatnonzero(self.row < 0)])
        parts = [self.statistics.take(self.row[self.row >= 0]), *computed]
        return join_statistics(parts).take(np.argsort(order))


def beside_indexes(dataset: Dataset, rules: Rules) -> Path:
    """Where the statistics lie that `dataserver index` computed."""
    return dataset.index_folder / f"disttrain.statistics-{_digest(rules.key())[:16]}"


def index_statistics(dataset: Dataset, rules: Rules, progress: Progress, workers: int | None = None) -> None:
    """Leave statistics beside the indexes; only what is new is computed; a warning where that is impossible.

    Raises:
        TokensMissingError, DatasetError: as `compute_statistics`.
    """
    path = beside_indexes(dataset, rules)
    stored = read_stored([path], dataset, rules)
    if stored.is_exact:
        return
    computed = compute_statistics(stored.missing(dataset), rules, progress, lambda: None, workers, 0)
    try:
        store(path, stored.merged(computed), dataset, rules)
    except DatasetError as error:
        _log.warning("%s; servers compute the statistics of the shards themselves until then", error)


def read_stored(paths: Sequence[Path], dataset: Dataset, rules: Rules) -> Stored:
    """What the first of some files says that has all shards of a dataset, or else the one that has most."""
    wanted = _identities(dataset.shards, rules)
    best = Stored(None, np.full(len(wanted), -1, np.int64))
    for path in paths:
        try:
            statistics, rows = _parse(*read_arrays(path), rules)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (ArraysError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s cannot be used (%s); it is computed again", path, error)
            continue
        with contextlib.suppress(OSError):  # used last
            os.utime(path)
        found = Stored(statistics, np.array([rows.get(identity, -1) for identity in wanted], np.int64))
        if best.statistics is None or found.count > best.count:
            best = found
        if found.count == len(wanted):
            break
    return best


def store(path: Path, statistics: ShardStatistics, dataset: Dataset, rules: Rules) -> None:
    """Write statistics. Raises DatasetError where that is impossible."""
    arrays: dict[str, Array] = {}
    for field in fields(ShardStatistics):
        part = getattr(statistics, field.name)
        if isinstance(part, Lists):
            arrays[f"{field.name}.at"] = part.at
            arrays[field.name] = _narrowed(part.values)
        else:
            arrays[field.name] = part
    identities = b"".join(_identities(dataset.shards, rules))
    arrays["shards"] = np.frombuffer(identities, np.uint8).reshape(-1, 32)
    write_arrays(path, {"version": STATISTICS_VERSION, "rules": rules.key()}, arrays)


def _parse(
    about: Mapping[str, Any], arrays: Mapping[str, Array], rules: Rules
) -> tuple[ShardStatistics, dict[bytes, int]]:
    """The statistics in a file, and which shard of it has which content."""
    if (about["version"], about["rules"]) != (STATISTICS_VERSION, rules.key()):
        raise ValueError("it was written by another release, or for other rules")
    identities = arrays["shards"]
    count = len(identities)
    parts: dict[str, Any] = {}
    for field in fields(ShardStatistics):
        values = arrays[field.name]
        parts[field.name] = values
        if f"{field.name}.at" in arrays:
            at = arrays[f"{field.name}.at"]
            if at.shape != (count + 1,) or at.dtype != np.int64 or (np.diff(at) < 0).any():
                raise ValueError("its lists overlap")
            if (at[0], at[-1]) != (0, len(values)):
                raise ValueError("its lists do not fit each other")
            parts[field.name] = Lists(at, values)
        elif len(values) != count or values.dtype != np.int64:
            raise ValueError("its parts do not fit each other")
        if values.ndim != 1 or values.dtype not in (np.int32, np.int64) or values.min(initial=0) < 0:
            raise ValueError("it holds something else than counts")
    text = identities.tobytes()
    return ShardStatistics(**parts), {text[i * 32 : i * 32 + 32]: i for i in range(count)}


def _narrowed(values: Array) -> Array:
    """The values in 32 bits, where all of them fit."""
    return values.astype(np.int32) if values.max(initial=0) <= np.iinfo(np.int32).max else values


def _identities(shards: Sequence[Shard], rules: Rules) -> list[bytes]:
    """What the statistics of each shard depend on beside the rules; quarantine lists name shards."""
    digests = [bytes.fromhex(shard.header.columns_digest) for shard in shards]
    if rules.metadata or rules.transformed_texts:
        made = [shard.transformed(rules.metadata, rules.transformed_texts) for shard in shards]
        digests = [hashlib.sha256(b"".join(both)).digest() for both in zip(digests, made, strict=True)]
    if rules.quarantine is None:
        return digests
    return [hashlib.sha256(d + s.name.encode()).digest() for d, s in zip(digests, shards, strict=True)]


def _is_plain(rules: Rules) -> bool:
    return not rules.filter and rules.quarantine is None and rules.split is None and rules.of_documents is None


def _key(dataset: Dataset, rules: Rules) -> str:
    transformed = dataset.transformed(rules.metadata, rules.transformed_texts)
    return _digest([dataset.fingerprint, *rules.key(), *([transformed] if transformed else [])])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps([STATISTICS_VERSION, value]).encode()).hexdigest()
