"""How long ranks wait for data, from the counters that servers give of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from dataserver.reporting.fleet_numbers import Answer, seconds_of

WINDOW_S: Final = 30.0
"""Shares are of the last 30 to 60 s, so that steps of some seconds do not make them jump."""

RankOfJob = tuple[str, str, int]
"""The first characters of the id of a job, a module, and a rank of it."""


class _Mark(NamedTuple):
    at_s: float
    """Seconds on the server's clock."""
    waited_s: float


@dataclass(frozen=True, slots=True)
class _Counter:
    since: _Mark
    """Where the share is taken from; `later` takes over from it."""
    later: _Mark
    last: _Mark
    share: float | None

    def then(self, now: _Mark) -> "_Counter":
        """The counter with another look at it."""
        if now.at_s <= self.last.at_s or now.waited_s < self.last.waited_s:  # the server, or the trainer, began anew
            return _Counter(now, now, now, None)
        share = min((now.waited_s - self.since.waited_s) / (now.at_s - self.since.at_s), 1.0)
        moves_on = now.at_s - self.later.at_s >= WINDOW_S
        since, later = (self.later, now) if moves_on else (self.since, self.later)
        return _Counter(since, later, now, share)


class RankWaits:
    """The waits of all ranks whose clients report them. For one thread at a time."""

    def __init__(self) -> None:
        self._counters: Mapping[tuple[str, RankOfJob], _Counter] = {}

    def note(self, answers: Sequence[Answer]) -> dict[RankOfJob, float]:
        """Take over a look at the servers.

        Returns:
            Share of the last time for which each rank waited for data; of several servers the largest.
        """
        marks = dict(_marks(answers))
        before = self._counters
        self._counters = {
            key: before[key].then(mark) if key in before else _Counter(mark, mark, mark, None)
            for key, mark in marks.items()
        }
        found: dict[RankOfJob, float] = {}
        for (_, rank), counter in self._counters.items():
            if counter.share is not None:
                found[rank] = max(found.get(rank, 0.0), counter.share)
        return found


def _marks(answers: Sequence[Answer]) -> Iterator[tuple[tuple[str, RankOfJob], _Mark]]:
    for answer in answers:
        for rank in () if answer.now is None else answer.now.ranks:
            if answer.now is not None and rank.HasField("waited"):
                mark = _Mark(seconds_of(answer.now.uptime), seconds_of(rank.waited))
                yield (answer.address, (rank.job, rank.module, rank.rank)), mark
