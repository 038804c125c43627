"""Faults in an order that a seed decides, over the steps of a job that is being read."""

import random
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
    """Its position in the order of how many streams come from each: 0 is the busiest."""
    kind: str
    lasts: int
    """Steps until it is over; with 0 it is over before anything else happens."""


def draw(seed: int, count: int, sites: int) -> list[Planned]:
    """A fault for each step from 1 on; all kinds come before any comes again, and busy sites are hit more often."""
    rng = random.Random(seed)
    weights = [2.0**-position for position in range(sites)]
    kinds: list[str] = []
    found = []
    for step in range(1, count + 1):
        kinds = kinds or rng.sample(sorted(FAULTS), len(FAULTS))
        found.append(Planned(step, rng.choices(range(sites), weights)[0], kinds.pop(), rng.randint(0, LONGEST)))
    return found


class Schedule:
    """Makes faults happen. Each site has one at a time, and one site at least has none: something can go on."""

    def __init__(self, sites: list[Site], jobs: Jobs, planned: list[Planned]) -> None:
        self._sites = sites
        self._jobs = jobs
        self._planned = {fault.step: fault for fault in planned}
        self._open: dict[int, tuple[Planned, ExitStack]] = {}
        """By site, in the order in which they began."""
        self._pool = ThreadPoolExecutor(len(sites))
        self._healing: dict[int, Future[None]] = {}

    def reach(self, step: int, used: Sequence[str]) -> None:
        """Do what is planned for a step, when every reader is in the middle of it.

        Args:
            step: the step.
            used: the address that each stream comes from.
        """
        fault = self._planned[step]
        order = sorted(range(len(self._sites)), key=lambda site: -used.count(self._sites[site].address))
        site = order[fault.site]
        for other, (begun, _) in tuple(self._open.items()):
            if other == site or begun.step + begun.lasts < step:
                self._heal(other)
        self._join(site)
        while len(self._open) + len(self._healing) >= len(self._sites) - 1:
            if not self._healing:
                self._heal(next(iter(self._open)))
            self._join(next(iter(self._healing)))
        stack = ExitStack()
        stack.enter_context(FAULTS[fault.kind](self._sites[site], self._jobs))
        self._open[site] = (fault, stack)
        if fault.lasts == 0:
            self._heal(site)

    def end(self) -> None:
        """Heal everything.

        Raises:
            Exception: something could not be healed: a server does not start again, or did not end well.
        """
        for site in tuple(self._open):
            self._heal(site)
        for site in tuple(self._healing):
            self._join(site)
        self._pool.shutdown()

    def _heal(self, site: int) -> None:
        """Begin to heal; meanwhile the readers go on."""
        self._healing[site] = self._pool.submit(self._open.pop(site)[1].close)

    def _join(self, site: int) -> None:
        if site in self._healing:
            self._healing.pop(site).result()
