"""Runs of shards, the parts in which the servers of a fleet measure a dataset for each other."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from dataserver.dataset import Dataset, Shard
from dataserver.jobs.measuring import Rules, measure_tasks
from dataserver.jobs.turns import UnwantedError
from dataserver.planning.measure import Measure, join_measures

RUN: Final = 64
"""Shards of a run. Where fewer are to be measured, a server does it alone."""
FORGOTTEN_S: Final = 60.0
"""What nobody has asked for so long is not measured to its end."""

Known = tuple[Measure, Mapping[bytes, int]]
"""A measure from a file, and which shard of it has which content."""


class NoSuchRunError(ValueError):
    """A dataset does not have so many runs."""


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRun:
    """The measure of one run, as servers tell it to each other."""

    name: str
    """Of the whole measure: a digest of the dataset's fingerprint and the rules."""
    identities: Sequence[bytes]
    """What tells the content of each of its shards, 32 bytes each."""
    measure: Measure


def rows_of_run(run: int, num_shards: int) -> slice:
    """The shards of a run among all of a dataset."""
    return slice(run * RUN, min(run * RUN + RUN, num_shards))


def is_shared(num_shards: int) -> bool:
    """Whether a fleet shares out so many shards that are to be measured."""
    return num_shards >= RUN


class Owners(Protocol):
    """The servers of a fleet, each of which owns some runs."""

    def mine(self, name: str, runs: Sequence[int]) -> list[int]:
        """Those of some runs of a measure that this server owns."""

    def fetch(self, runs: "Runs", wanted: Sequence[int], progress: Callable[[int], object]) -> dict[int, Measure]:
        """Some runs from their owners, those that are to be had in time and are right.

        `progress` is told, often, how many shards have come; what it raises ends the work.
        """


class Asked:
    """Work that goes on while somebody asks for it."""

    def __init__(self) -> None:
        self.asked = time.monotonic()
        """When somebody last did."""

    def look(self) -> None:
        """End the work, by an UnwantedError, if nobody asks any more, or the process ends."""
        if time.monotonic() - self.asked > FORGOTTEN_S or not threading.main_thread().is_alive():
            raise UnwantedError


class Runs(Asked):
    """What is measured here of a dataset under some rules, run by run, once for all who ask. Thread-safe."""

    def __init__(
        self, name: str, dataset: Dataset, rules: Rules, identities: Sequence[bytes], known: Known | None
    ) -> None:
        """Measure nothing yet.

        Args:
            name: of the measure in all servers.
            dataset: the dataset.
            rules: what is kept of it, and how it is sized.
            identities: what tells the content of each shard, 32 bytes each.
            known: what a file says of some shards.
        """
        super().__init__()
        self.name, self.dataset, self.rules = name, dataset, rules
        self.identities = identities
        self._known = known
        at = [-1 if known is None else known[1].get(identity, -1) for identity in identities]
        self._at = np.array(at, np.int64)
        """int64 [shards]: where the known measure has each shard, or -1."""
        self._lock = threading.Lock()
        self._begun: dict[int, Future[Measure]] = {}

    @property
    def missing(self) -> list[Shard]:
        """The shards that are not known."""
        return self._unknown(slice(None))

    @property
    def new(self) -> list[int]:
        """The runs that have such shards."""
        return sorted({row // RUN for row in np.flatnonzero(self._at < 0).tolist()})

    def rows(self, run: int) -> slice:
        """The shards of a run among all."""
        return rows_of_run(run, len(self.identities))

    def shards(self, run: int) -> Sequence[Shard]:
        """The shards of a run."""
        return self.dataset.shards[self.rows(run)]

    def parts(self) -> list[Measure]:
        """What is in memory."""
        with self._lock:
            made = [found.result() for found in self._begun.values() if found.done() and not found.exception()]
        return made if self._known is None else [self._known[0], *made]

    def has_begun(self, run: int) -> bool:
        """Whether a run was measured, or is being measured."""
        with self._lock:
            return run in self._begun

    def begin(self, runs: Sequence[int]) -> dict[int, Future[Measure]]:
        """The measures of some runs; those that nobody began are made from now on.

        They may fail with a TokensMissingError or DatasetError, and with an UnwantedError if nobody asks any more; what
        failed is begun anew by the next call.
        """
        self.asked = time.monotonic()
        with self._lock:
            fresh = {run: Future[Measure]() for run in runs if run not in self._begun}
            self._begun |= fresh
            found = {run: self._begun[run] for run in runs}
        if fresh:
            threading.Thread(target=self._measure, args=(fresh,), name="measuring runs", daemon=True).start()
        return found

    def joined(self, parts: Mapping[int, Measure]) -> Measure:
        """The measure of all shards, from those of the new runs; the others are known."""
        count = -(-len(self.identities) // RUN)
        return join_measures([parts[r] if r in parts else self.merged([], self.rows(r)) for r in range(count)])

    def merged(self, measured: Sequence[Measure], rows: slice = slice(None)) -> Measure:
        """The measure of some shards, by default of all, from those of the ones that are not known."""
        at, parts = self._at[rows], list(measured)
        if self._known is not None:
            if np.array_equal(at, np.arange(len(self._known[0]))):
                return self._known[0]
            parts.insert(0, self._known[0].take(at[at >= 0]))
        order = np.concatenate([np.flatnonzero(at >= 0), np.flatnonzero(at < 0)])
        return join_measures(parts).take(np.argsort(order))

    def _unknown(self, rows: slice) -> list[Shard]:
        return [s for s, at in zip(self.dataset.shards[rows], self._at[rows].tolist(), strict=True) if at < 0]

    def _measure(self, left: dict[int, Future[Measure]]) -> None:
        runs = list(left)
        try:
            for position, measured in measure_tasks([self._unknown(self.rows(r)) for r in runs], self.rules, self.look):
                run = runs[position]
                left[run].set_result(self.merged(measured, self.rows(run)))
                del left[run]
        except BaseException as error:
            with self._lock:
                for run in left:
                    del self._begun[run]
            for future in left.values():
                future.set_exception(error)
