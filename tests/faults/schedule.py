"""Faults in an order that a seed decides, over the steps of a job that is being read."""

import random
import threading
from contextlib import ExitStack
from dataclasses import dataclass

from faults.fleet import FAULTS, Jobs, Site

LONGEST = 3
"""Steps that a fault lasts at most."""


@dataclass(frozen=True)
class Planned:
    """One fault."""

    step: int
    site: int
    kind: str
    lasts: int
    """Steps until it is over; with 0 it is over before anything else happens."""


def draw(seed: int, count: int, sites: int) -> list[Planned]:
    """A fault for each step from 1 on; all kinds come before any comes again."""
    rng = random.Random(seed)
    kinds: list[str] = []
    found = []
    for step in range(1, count + 1):
        kinds = kinds or rng.sample(sorted(FAULTS), len(FAULTS))
        found.append(Planned(step, rng.randrange(sites), kinds.pop(), rng.randint(0, LONGEST)))
    return found


class Schedule:
    """Makes faults happen. Each site has one at a time, and one site at least has none: something can go on."""

    def __init__(self, sites: list[Site], jobs: Jobs, planned: list[Planned]) -> None:
        self._sites = sites
        self._jobs = jobs
        self._planned = {fault.step: fault for fault in planned}
        self._open: dict[int, tuple[Planned, ExitStack]] = {}
        """By site, in the order in which they began."""
        self._healing: dict[int, threading.Thread] = {}
        self.errors: list[Exception] = []
        """Of faults that could not be healed: a server that does not start again."""

    def reach(self, step: int) -> None:
        """Do what is planned for a step, when every reader is in the middle of it."""
        fault = self._planned[step]
        for site, (begun, _) in tuple(self._open.items()):
            if site == fault.site or begun.step + begun.lasts < step:
                self._heal(site)
        while len(self._open) + sum(t.is_alive() for t in self._healing.values()) >= len(self._sites) - 1:
            self._make_room()
        self._join(fault.site)
        stack = ExitStack()
        stack.enter_context(FAULTS[fault.kind](self._sites[fault.site], self._jobs))
        self._open[fault.site] = (fault, stack)
        if fault.lasts == 0:
            self._heal(fault.site)

    def end(self) -> None:
        """Heal everything."""
        for site in tuple(self._open):
            self._heal(site)
        for site in tuple(self._healing):
            self._join(site)
        assert not self.errors

    def _make_room(self) -> None:
        if self._open:
            self._heal(next(iter(self._open)))
        self._join(next(iter(self._healing)))

    def _heal(self, site: int) -> None:
        """In a thread of its own: meanwhile the readers go on."""
        _, stack = self._open.pop(site)

        def heal() -> None:
            try:
                stack.close()
            except Exception as error:
                self.errors.append(error)

        self._join(site)
        self._healing[site] = threading.Thread(target=heal)
        self._healing[site].start()

    def _join(self, site: int) -> None:
        if site in self._healing:
            self._healing.pop(site).join()
