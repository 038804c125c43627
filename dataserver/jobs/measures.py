"""Measures of datasets: made once, kept on disk, and never by two threads at a time.

`dataserver index` leaves a measure beside the indexes for each tokenizer and the default sizing. What a job asks for
besides, a filter or another sizing, a server measures, sharing the work with others of its fleet (`runs.py`), and keeps
in its cache folder. A file holds a measure of each shard with what identifies that shard's content, so that a dataset
which has grown is measured where it is new.
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from dataserver.dataset import Array, ArraysError, Dataset, DatasetError, Shard, read_arrays, write_arrays
from dataserver.jobs.errors import MeasuringError
from dataserver.jobs.measuring import Progress, Rules, measure_shards
from dataserver.jobs.once import LOOK_S, OnceCache
from dataserver.jobs.runs import Asked, Known, MeasuredRun, NoSuchRunError, Owners, Runs, is_shared, rows_of_run
from dataserver.jobs.sizes import memory_of
from dataserver.jobs.turns import Unwanted, UnwantedError, always_wanted
from dataserver.planning.measure import Lists, Measure

MEASURE_VERSION: Final = 1
"""Of what a measure says and how it is stored."""
KEPT_BYTES: Final = 64 << 20
"""Of measures in memory, and the one used last in any case. One of 10,000 shards takes 40 MB at most."""
KEPT_FROM_S: Final = 0.5
"""What takes less is neither kept on disk nor worth a line in the log."""
KEPT_FILES: Final = 256
"""In a cache folder; those used longest ago go first."""

_log = logging.getLogger(__name__)


class Measures:
    """The measures of a server. Thread-safe."""

    def __init__(self, folder: Path | None = None, owners: Owners | None = None) -> None:
        """Keep nothing yet.

        Args:
            folder: where measures are kept; nowhere but in memory by default.
            owners: the servers of the fleet; this one alone by default.
        """
        self._folder = folder
        self._owners = owners
        self._lock = threading.Lock()
        self._making: dict[str, _Making] = {}
        self._known = OnceCache[str, Measure](KEPT_BYTES, memory_of)
        self._runs = OnceCache[str, Runs](KEPT_BYTES, lambda runs: memory_of(runs.parts()))
        """What is measured in parts, until all of it is known."""
        self._warned = False

    def get(
        self, dataset: Dataset, rules: Rules, unwanted: Unwanted = always_wanted, patience_s: float = float("inf")
    ) -> Measure:
        """The measure of all shards of a dataset.

        Args:
            dataset: the dataset.
            rules: what is kept of it, and how it is sized.
            unwanted: whether this caller no longer waits.
            patience_s: time after which it does not want to wait any longer; the measure is made all the same.

        Raises:
            MeasuringError: it takes longer than that; says how far it is.
            UnwantedError: this caller no longer waits.
            TokensMissingError, DatasetError: as `measure_shards`.
        """
        key = _key(dataset, rules)
        give_up = time.monotonic() + patience_s
        while (found := self._known.find(key)) is None:
            with self._lock:
                making = self._making.get(key)
                if making is None:
                    making = self._making[key] = _Making()
                    work = (key, making, dataset, rules)
                    threading.Thread(target=self._make, args=work, name="measuring", daemon=True).start()
            making.asked = time.monotonic()
            with contextlib.suppress(TimeoutError):
                return making.made.result(LOOK_S)
            if unwanted():
                raise UnwantedError
            if time.monotonic() > give_up:
                why = "which a new filter, quarantine list, sizing or tokenizer takes once; ask again"
                raise MeasuringError(f"{making.progress()}, {why}")
        return found

    def _make(self, key: str, making: "_Making", dataset: Dataset, rules: Rules) -> None:
        try:
            measure = self._found_or_made(key, making, dataset, rules)
            self._known.keep(key, measure)  # before it counts as made: whoever comes in between finds it
            self._runs.drop(lambda name: name == key)
        except BaseException as error:
            with self._lock:
                del self._making[key]
            making.made.set_exception(error)
            return
        with self._lock:
            del self._making[key]
        making.made.set_result(measure)

    def run(self, dataset: Dataset, rules: Rules, number: int, unwanted: Unwanted) -> MeasuredRun:
        """The measure of one run of a dataset's shards, for another server: nobody is asked for it.

        All other runs that this server owns are begun, since it will be asked for them next.

        Raises:
            NoSuchRunError: it does not have so many.
            UnwantedError: this caller no longer waits.
            TokensMissingError, DatasetError: as `measure_shards`.
        """
        name, rows = _key(dataset, rules), rows_of_run(number, len(dataset.shards))
        if rows.start >= rows.stop:
            raise NoSuchRunError(f"run {number} does not exist; the dataset has {len(dataset.shards)} shards")
        whole = self._known.find(name)
        measure = (
            self._run_made(name, dataset, rules, number, unwanted)
            if whole is None
            else whole.take(np.arange(rows.start, rows.stop))
        )
        return MeasuredRun(name, _identities(dataset.shards[rows], rules), measure)

    def _run_made(self, name: str, dataset: Dataset, rules: Rules, number: int, unwanted: Unwanted) -> Measure:
        runs, begun = self._runs_of(name, dataset, rules), [number]
        if not runs.has_begun(number) and self._owners is not None:
            begun = sorted({number, *self._owners.mine(name, runs.new)})
        future = runs.begin(begun)[number]
        while not future.done():
            runs.asked = time.monotonic()
            wait([future], LOOK_S)
            if unwanted():
                raise UnwantedError
        self._runs.keep(name, runs)  # it takes more now
        return future.result()

    def _found_or_made(self, key: str, making: "_Making", dataset: Dataset, rules: Rules) -> Measure:
        runs = self._runs_of(key, dataset, rules)
        missing = runs.missing
        if self._owners is None or not is_shared(len(missing)):
            measure = runs.merged(measure_shards(missing, rules, making.tell, making.look))
        else:
            measure = self._shared(runs, making, self._owners)
        if missing and (spent_s := making.spent_s) > KEPT_FROM_S:
            _log.info("measured %d of %d shards of a dataset in %.1f s", len(missing), len(measure), spent_s)
            if (path := self._path(key)) is not None:
                self._store(path, measure, dataset, rules)
        return measure

    def _shared(self, runs: Runs, making: "_Making", owners: Owners) -> Measure:
        """Measure the runs that this server owns, fetch the others, and measure those that are not to be had."""
        new = runs.new
        sizes = {run: len(runs.shards(run)) for run in new}
        begun = runs.begin(owners.mine(runs.name, new))

        def tell(fetched: int) -> None:
            making.look()
            runs.asked = making.asked
            making.tell(fetched + sum(sizes[run] for run, made in begun.items() if made.done()), sum(sizes.values()))

        fetched = owners.fetch(runs, [run for run in new if run not in begun], tell)
        begun |= runs.begin([run for run in new if run not in begun and run not in fetched])
        while wait(begun.values(), LOOK_S).not_done:
            tell(sum(sizes[run] for run in fetched))
        return runs.joined({**fetched, **{run: made.result() for run, made in begun.items()}})

    def _runs_of(self, key: str, dataset: Dataset, rules: Rules) -> Runs:
        def known() -> Known | None:
            path = self._path(key)
            files = [beside_indexes(dataset, rules)] if _is_plain(rules) else []
            return best_known([*files, *([path] if path else [])], dataset, rules)

        identities = _identities(dataset.shards, rules)
        return self._runs.get(key, lambda _: Runs(key, dataset, rules, identities, known()))

    def _path(self, key: str) -> Path | None:
        return None if self._folder is None else self._folder / f"measure-{key[:32]}"

    def _store(self, path: Path, measure: Measure, dataset: Dataset, rules: Rules) -> None:
        try:
            store(path, measure, dataset, rules)
        except DatasetError as error:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "measures of datasets cannot be kept in %s (%s): make room there, or name another folder with "
                    "--cache-dir; until then they are made again",
                    *(path.parent, error.__cause__ or error),
                )
            return
        with contextlib.suppress(OSError):
            files = sorted(path.parent.glob("measure-*"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
            for old in files[KEPT_FILES:]:
                old.unlink()


class _Making(Asked):
    """A measure that is being made."""

    def __init__(self) -> None:
        super().__init__()
        self.made = Future[Measure]()
        self._began = self.asked
        self._done = self._total = 0

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
        return f"{done:,} of {self._total:,} shards are measured{left}"


def beside_indexes(dataset: Dataset, rules: Rules) -> Path:
    """Where the measure lies that `dataserver index` made."""
    return dataset.index_folder / f"disttrain.measure-{_digest(rules.key())[:16]}"


def keep_measure(dataset: Dataset, rules: Rules, progress: Progress, workers: int | None = None) -> None:
    """Leave a measure beside the indexes, of which only what is new is made; a warning where that is impossible.

    Raises:
        TokensMissingError, DatasetError: as `measure_shards`.
    """
    path = beside_indexes(dataset, rules)
    known = best_known([path], dataset, rules)
    runs = Runs("", dataset, rules, _identities(dataset.shards, rules), known)
    if not runs.missing and known is not None and len(known[0]) == len(dataset.shards):
        return
    measured = measure_shards(runs.missing, rules, progress, lambda: None, workers, 0)
    try:
        store(path, runs.merged(measured), dataset, rules)
    except DatasetError as error:
        _log.warning("%s; servers measure the shards themselves until then", error)


def best_known(paths: Sequence[Path], dataset: Dataset, rules: Rules) -> Known | None:
    """The first of some files that knows all shards of a dataset, or else the one that knows most; None without any."""
    best, most = None, -1
    wanted = _identities(dataset.shards, rules)
    for path in paths:
        try:
            known = _parse(*read_arrays(path), rules)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (ArraysError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s cannot be used (%s); it is made again", path, error)
            continue
        with contextlib.suppress(OSError):  # used last
            os.utime(path)
        count = sum(identity in known[1] for identity in wanted)
        if count > most:
            best, most = known, count
        if count == len(wanted):
            break
    return best


def store(path: Path, measure: Measure, dataset: Dataset, rules: Rules) -> None:
    """Write a measure. Raises DatasetError where that is impossible."""
    arrays: dict[str, Array] = {}
    for field in fields(Measure):
        part = getattr(measure, field.name)
        if isinstance(part, Lists):
            arrays[f"{field.name}.at"] = part.at
            arrays[field.name] = _narrowed(part.values)
        else:
            arrays[field.name] = part
    identities = b"".join(_identities(dataset.shards, rules))
    arrays["shards"] = np.frombuffer(identities, np.uint8).reshape(-1, 32)
    write_arrays(path, {"version": MEASURE_VERSION, "rules": rules.key()}, arrays)


def _parse(about: Mapping[str, Any], arrays: Mapping[str, Array], rules: Rules) -> Known:
    if (about["version"], about["rules"]) != (MEASURE_VERSION, rules.key()):
        raise ValueError("it was written by another release, or for other rules")
    identities = arrays["shards"]
    count = len(identities)
    parts: dict[str, Any] = {}
    for field in fields(Measure):
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
    return Measure(**parts), {text[i * 32 : i * 32 + 32]: i for i in range(count)}


def _narrowed(values: Array) -> Array:
    """The values in 32 bits, where all of them fit."""
    return values.astype(np.int32) if values.max(initial=0) <= np.iinfo(np.int32).max else values


def _identities(shards: Sequence[Shard], rules: Rules) -> list[bytes]:
    """What a measure of each shard depends on beside the rules; quarantine lists name shards."""
    digests = [bytes.fromhex(shard.header.columns_digest) for shard in shards]
    if rules.quarantine is None:
        return digests
    return [hashlib.sha256(d + s.name.encode()).digest() for d, s in zip(digests, shards, strict=True)]


def _is_plain(rules: Rules) -> bool:
    return not rules.filter and rules.quarantine is None


def _key(dataset: Dataset, rules: Rules) -> str:
    return _digest([dataset.fingerprint, *rules.key()])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps([MEASURE_VERSION, value]).encode()).hexdigest()
