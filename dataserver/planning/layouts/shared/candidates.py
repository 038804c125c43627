"""The plans of one step among which a planner chooses: a layout's own values, ranked and shown in one way."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from dataserver.planning.plan.plan import Candidate


class CandidatePlan(Protocol):
    """What every layout knows of a plan that it compares."""

    @property
    def name(self) -> str:
        """How it was found, for people."""

    @property
    def makespan_ns(self) -> int:
        """Simulated time of the step."""


Plan = TypeVar("Plan", bound=CandidatePlan)


def ranked(candidates: Iterable[Plan]) -> list[Plan]:
    """Fastest first; those that are equally fast stay in their order."""
    return sorted(candidates, key=lambda c: c.makespan_ns)


def fastest(candidates: Iterable[Plan]) -> Plan:
    """The first of the fastest; there is one at least."""
    return min(candidates, key=lambda c: c.makespan_ns)


def shown(candidates: Sequence[CandidatePlan]) -> tuple[Candidate, ...]:
    """What a plan shows of those that were compared; nothing where there was only one."""
    return tuple(Candidate(c.name, c.makespan_ns) for c in candidates) if len(candidates) > 1 else ()
