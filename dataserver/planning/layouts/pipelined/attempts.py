"""The plans for a number of microbatches: rule-based ones that fit memory, and those that search finds."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import BalancePolicy, ModuleKind, ModuleSpec, OrderPolicy
from dataserver.planning.layouts.pipelined.candidates import CandidatePlan, ImageSpread, Trial, candidates_of
from dataserver.planning.layouts.pipelined.packed import PackedStep
from dataserver.planning.layouts.pipelined.placing import PlacementProblem, goal_ns, lower_bound_ns, raced, searched
from dataserver.planning.layouts.pipelined.starts import CANONICAL, STRATIFIED, Known, Starts, find_starts
from dataserver.planning.layouts.shared.candidates import fastest
from dataserver.planning.layouts.shared.waves import extras

IMPATIENT_SINCE = 6
"""The first plan_version whose searches end where they gain next to nothing any more."""

ROUNDS_SINCE = 7
"""The first plan_version whose searches improve many components at once, in pairs."""

RACED_SINCE = 8
"""The first plan_version that also searches a few ranks of many microbatches from even orders of these."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The plans for one number of microbatches."""

    packed: PackedStep
    known: Known
    starts: Starts
    candidates: tuple[CandidatePlan, ...]
    """The rule-based plans that fit memory."""
    shortfall: ModuleSpec | None
    """The module whose memory was too small for a plan; of several, the last that was found."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches that each rank runs in the step."""
        return self.packed.num_microbatches

    @property
    def num_sequences(self) -> int:
        """Sequences of all ranks together."""
        return self.known.problem.num_sequences

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
        """Makespan of the fastest rule-based plan with no extra microbatch in flight; there must be one."""
        return fastest([c for c in self.candidates if not c.extra] or self.candidates).makespan_ns


def attempt(packed: PackedStep, known: Known | None = None) -> Attempt:
    """Make the rule-based plans; with what a probe found."""
    known = Known(packed) if known is None else known
    starts = find_starts(packed, known)
    candidates, shortfall = _outcome(packed, _by_rules(packed, known.problem, starts))
    return Attempt(packed, known, starts, candidates, shortfall or starts.shortfall)


@dataclass(frozen=True, slots=True)
class Probe:
    """What one rule-based plan tells of a number of microbatches."""

    packed: PackedStep
    known: Known
    bound_ns: int
    """A time that no plan of the same sequences can beat."""
    makespan_ns: int | None = None
    """Time of the placement whose slowest component is fastest, with no extra microbatch in flight; time of another
    placement where memory does not hold that. None if memory holds none, or if no plan can beat what there is."""
    is_short: bool = False
    """Whether stages of that plan hold less than the schedule asks for."""


def probe(packed: PackedStep, known: Known, fastest_ns: int) -> Probe:
    """Look at a number of microbatches, unless no plan of it can beat `fastest_ns`."""
    bound_ns = lower_bound_ns(known.problem)
    if bound_ns >= fastest_ns:
        return Probe(packed, known, bound_ns)
    starts = find_starts(packed, known).placements
    spreads = _spreads(packed, known.problem.components, canonical=False)[-1:]  # over all ranks, if images may go there
    guided = known.guided(packed, 0, starts)
    names = sorted(starts, key=lambda name: guided[name][1])
    outcomes = (o for name in names for o in candidates_of(packed, Trial("by rules", starts[name], spreads, (0,))))
    found = next((o for o in outcomes if isinstance(o, CandidatePlan)), None)
    if found is None:
        return Probe(packed, known, bound_ns)
    return Probe(packed, known, bound_ns, found.makespan_ns, found.in_flight.is_short)


def search(made: Attempt, most_sequences: int) -> tuple[CandidatePlan, ...]:
    """The plans that search finds, if the job asks for it; none if no start fits memory.

    The search budget is for `most_sequences` at most (`placing.searched`).
    """
    if made.packed.layout.order is not OrderPolicy.SEARCH or not made.starts.placements:
        return ()
    return _outcome(made.packed, _searches(made, most_sequences))[0]


def _outcome(packed: PackedStep, trials: Iterable[Trial]) -> tuple[tuple[CandidatePlan, ...], ModuleSpec | None]:
    """The candidates, and the last module whose memory did not hold one.

    None depends on another, so threads share those of a large step, a spread of images at a time. One thread tries all
    spreads of a placement in a row, and arranges its samples once.
    """
    parts = list(trials)
    if packed.is_shared:
        parts = [replace(trial, spreads=(spread,)) for trial in parts for spread in trial.spreads]
    found = [outcome for outcomes in packed.each([_candidates(packed, part) for part in parts]) for outcome in outcomes]
    shortfall = [o for o in found if isinstance(o, ModuleSpec)]
    return tuple(o for o in found if isinstance(o, CandidatePlan)), shortfall[-1] if shortfall else None


def _candidates(packed: PackedStep, trial: Trial) -> Callable[[], list[CandidatePlan | ModuleSpec]]:
    """What `candidates_of` finds, for whichever thread calls it."""
    return lambda: list(candidates_of(packed, trial))


def _by_rules(packed: PackedStep, problem: PlacementProblem, starts: Starts) -> Iterator[Trial]:
    """The rule-based placements, each with the numbers of extra microbatches in flight to try.

    Canonical order is always one of them. Where a search follows, they are what it begins with; `STRATIFIED`, which no
    other policy has, is compared itself only where the search goes by an estimate or memory may keep it from any.
    """
    guessed = packed.layout.chunks > 1 or any(m.padded for m in packed.modules) or problem.transfers is not None
    all_of_them = packed.layout.order is not OrderPolicy.SEARCH or guessed or problem.budgets is not None
    for name, placement in starts.placements.items():
        if all_of_them or not name.startswith(STRATIFIED):
            spreads = _spreads(packed, problem.components, name == CANONICAL)
            yield Trial(name, placement, spreads, extras(packed.execution))


def _searches(made: Attempt, most_sequences: int) -> Iterator[Trial]:
    """From the best start for every number of extra microbatches, unless memory makes two of them the same."""
    packed, starts, before = made.packed, made.starts.placements, list[I64]()
    spreads = _spreads(packed, made.known.problem.components, canonical=False)
    for extra in extras(packed.execution):
        guided = made.known.guided(packed, extra, starts)
        best = min(guided, key=lambda name: guided[name][1])
        problem = guided[best][0]
        if not any(np.array_equal(problem.in_flight, other) for other in before):
            seed, version = packed.job.stream.seed, packed.execution.plan_version
            goal = goal_ns(problem)
            found = searched(
                problem, starts[best], packed.step, seed, most_sequences, goal,
                patient=version < IMPATIENT_SINCE, in_rounds=version >= ROUNDS_SINCE,
            )  # fmt: skip
            yield Trial("search", found, spreads, (extra,))
            if version >= RACED_SINCE:
                even = raced(problem, starts[best], found, packed.step, seed, most_sequences, goal)
                if even is not None:
                    yield Trial("search from even orders", even, spreads, (extra,))
        before.append(problem.in_flight)


def _spreads(packed: PackedStep, components: int, canonical: bool) -> tuple[ImageSpread, ...]:
    """The ways to spread images that can differ: within components, over all ranks, in canonical order also beside."""
    others = [m for m in packed.modules if m.kind is not ModuleKind.BACKBONE]
    everywhere = ImageSpread()
    if packed.execution.identity_routing:
        return (ImageSpread(beside=True),)
    evenly = canonical and any(m.balance is not BalancePolicy.EVEN for m in others)
    even = (ImageSpread(even=True),) if evenly else ()
    if all(m.balance.keeps_order for m in others):
        return (everywhere, *even)
    spreads = (ImageSpread(components), everywhere) if components > 1 else (everywhere,)
    same = all(m.dp == components for m in others)  # components of one rank leave no other
    if not canonical:
        return spreads
    return (*spreads, *even) if same else (*spreads, *even, ImageSpread(beside=True))
