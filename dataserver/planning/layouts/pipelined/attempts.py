"""The plans for a number of microbatches: rule-based ones that fit memory, and those that search finds."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import BalancePolicy, ModuleKind, ModuleSpec, OrderPolicy
from dataserver.planning.layouts.pipelined.candidates import CandidatePlan, ImageSpread, Trial, candidates_of
from dataserver.planning.layouts.pipelined.packed import PackedStep
from dataserver.planning.layouts.pipelined.placing import NO_GOAL, goal_ns, lower_bound_ns, makespan_ns, searched
from dataserver.planning.layouts.pipelined.starts import (
    CANONICAL,
    STRATIFIED,
    Starts,
    find_starts,
    guided_problem,
    problem_of,
)
from dataserver.planning.layouts.shared.candidates import fastest
from dataserver.planning.layouts.shared.finalists import FINALISTS_SINCE
from dataserver.planning.layouts.shared.waves import extras

IMPATIENT_SINCE = 6
"""The first plan_version whose searches end where they gain nothing any more."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The plans for one number of microbatches."""

    packed: PackedStep
    starts: Starts
    candidates: tuple[CandidatePlan, ...]
    """The rule-based plans that fit memory."""
    shortfall: ModuleSpec | None
    """The module whose memory was too small for a plan; of several, the last that was found."""

    @property
    def num_microbatches(self) -> int:
        """Of each rank."""
        return self.packed.num_microbatches

    @property
    def num_sequences(self) -> int:
        """Of all ranks together."""
        return self.starts.problem.num_sequences

    @property
    def is_alone(self) -> bool:
        """Whether every sample is a sequence of its own."""
        return self.num_sequences == len(self.packed.samples)

    @property
    def is_short(self) -> bool:
        """Whether memory holds less in flight than the schedule asks for."""
        return any(c.in_flight.is_short for c in self.candidates if not c.extra)

    @property
    def fastest_ns(self) -> int:
        """Makespan of the fastest rule-based plan with no extra microbatch in flight; there must be one.

        Before plan_version 4, with any number of them.
        """
        strict = [c for c in self.candidates if not c.extra] if self.packed.execution.plan_version >= 4 else []
        return fastest(strict or self.candidates).makespan_ns


def attempt(packed: PackedStep) -> Attempt:
    """Make the rule-based plans."""
    starts = find_starts(packed, problem_of(packed))
    candidates, shortfall = _outcome(packed, _by_rules(packed, starts))
    return Attempt(packed, starts, candidates, shortfall or starts.shortfall)


@dataclass(frozen=True, slots=True)
class Probe:
    """What one rule-based plan tells of a number of microbatches."""

    packed: PackedStep
    bound_ns: int
    """A time that no plan of the same sequences can beat."""
    makespan_ns: int | None = None
    """Of the placement whose slowest component is fastest, with no extra microbatch in flight; of another one where
    memory does not hold that; None if it holds none, or if no plan can beat what there is."""
    is_short: bool = False
    """Whether stages of that plan hold less than the schedule asks for."""


def probe(packed: PackedStep, fastest_ns: int) -> Probe:
    """Look at a number of microbatches, unless no plan of it can beat `fastest_ns`."""
    problem = problem_of(packed)
    bound_ns = lower_bound_ns(problem)
    if bound_ns >= fastest_ns:
        return Probe(packed, bound_ns)
    starts = find_starts(packed, problem)
    spreads = _spreads(packed, problem.components, canonical=False)[-1:]  # over all ranks, if images may go there
    placements = [*starts.by_rules.values(), *starts.by_algorithm_2.values()]
    placements.sort(key=lambda start: makespan_ns(guided_problem(packed, problem, 0, start), start))
    outcomes = (o for start in placements for o in candidates_of(packed, Trial("by rules", start, spreads, (0,))))
    found = next((o for o in outcomes if isinstance(o, CandidatePlan)), None)
    if found is None:
        return Probe(packed, bound_ns)
    return Probe(packed, bound_ns, found.makespan_ns, found.in_flight.is_short)


def search(made: Attempt, most_sequences: int) -> tuple[CandidatePlan, ...]:
    """The plans that search finds, if the job asks for it; none if no start fits memory.

    The search budget is for `most_sequences` at most (`placing.searched`).
    """
    if made.packed.layout.order is not OrderPolicy.SEARCH or not made.starts.by_rules:
        return ()
    return _outcome(made.packed, _searches(made.packed, made.starts, most_sequences))[0]


def _outcome(packed: PackedStep, trials: Iterable[Trial]) -> tuple[tuple[CandidatePlan, ...], ModuleSpec | None]:
    """The candidates, and the last module whose memory did not hold one."""
    found = [outcome for trial in trials for outcome in candidates_of(packed, trial)]
    shortfall = [o for o in found if isinstance(o, ModuleSpec)]
    return tuple(o for o in found if isinstance(o, CandidatePlan)), shortfall[-1] if shortfall else None


def _by_rules(packed: PackedStep, starts: Starts) -> Iterator[Trial]:
    """The rule-based placements, each with the numbers of extra microbatches in flight to try.

    Canonical order is always one of them. Where a search follows, they are what it begins with. Since plan_version 4
    all of them are compared then, too, but for `STRATIFIED`, which no other policy has.
    """
    searches, some_extras = packed.layout.order is OrderPolicy.SEARCH, extras(packed.execution)
    guessed = packed.layout.chunks > 1 or any(m.padded for m in packed.modules)  # the search goes by an estimate
    guessed = guessed or starts.problem.transfers is not None
    compares, placements = packed.execution.plan_version >= FINALISTS_SINCE, dict(starts.by_rules)
    if guessed or not searches or compares:
        placements |= starts.by_algorithm_2
    for name, placement in placements.items():
        taken = not searches or guessed or name == CANONICAL or starts.problem.budgets is not None
        if taken or (compares and not name.startswith(STRATIFIED)):
            spreads = _spreads(packed, starts.problem.components, name == CANONICAL)
            yield Trial(name, placement, spreads, some_extras if compares or not searches else some_extras[:1])


def _searches(packed: PackedStep, starts: Starts, most_sequences: int) -> Iterator[Trial]:
    """From the best start for every number of extra microbatches, unless memory makes two of them the same.

    Before plan_version 3 a search used up its budget wherever it was.
    """
    has_goal = packed.execution.plan_version >= 3
    placements, before = [*starts.by_rules.values(), *starts.by_algorithm_2.values()], list[I64]()
    spreads = _spreads(packed, starts.problem.components, canonical=False)
    for extra in extras(packed.execution):
        guided = [(guided_problem(packed, starts.problem, extra, start), start) for start in placements]
        problem, best = min(guided, key=lambda pair: makespan_ns(*pair))
        if not any(np.array_equal(problem.in_flight, other) for other in before):
            goal = goal_ns(problem) if has_goal else NO_GOAL
            seed, patient = packed.job.stream.seed, packed.execution.plan_version < IMPATIENT_SINCE
            found = searched(problem, [best], packed.step, seed, most_sequences, goal, patient=patient)
            yield Trial("search", found, spreads, (extra,))
        before.append(problem.in_flight)


def _spreads(packed: PackedStep, components: int, canonical: bool) -> tuple[ImageSpread, ...]:
    """The ways to spread images that can differ: within components, over all ranks, in canonical order also beside."""
    others = [m for m in packed.modules if m.kind is not ModuleKind.BACKBONE]
    everywhere = ImageSpread()
    if packed.execution.identity_routing:
        return (ImageSpread(beside=True),)
    compares = canonical and packed.execution.plan_version >= FINALISTS_SINCE
    evenly = compares and any(m.balance is not BalancePolicy.EVEN for m in others)
    even = (ImageSpread(even=True),) if evenly else ()
    if all(m.balance.keeps_order for m in others):
        return (everywhere, *even)
    spreads = (ImageSpread(components), everywhere) if components > 1 else (everywhere,)
    same = all(m.dp == components for m in others)  # components of one rank leave no other
    if not canonical:
        return spreads
    return (*spreads, *even) if same else (*spreads, *even, ImageSpread(beside=True))
