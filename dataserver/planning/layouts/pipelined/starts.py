"""Rule-based placements that fit memory, and the problem that a search solves from one of them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.job.fields import BalancePolicy, ModuleSpec, OrderPolicy, Schedule
from dataserver.planning.layouts.pipelined.packed import PackedStep
from dataserver.planning.layouts.pipelined.placing import (
    PADDED_RUNS,
    Placement,
    PlacementProblem,
    balanced,
    fitted,
    in_disttrain_order,
    makespan_ns,
    microbatch_sums,
    padded_runs,
    placement_problem,
    shortfall_alone,
    spread_over_waves,
    stratified,
    with_parity,
)
from dataserver.planning.layouts.shared.waves import Units, one_f_one_b_in_flight

CANONICAL = "canonical order"
STRATIFIED = "stratified"

Placements = Mapping[str, Placement]
"""Placements by the names that messages give them."""

Rules = Mapping[str, Callable[[], Placement]]
"""Functions that find placements, by name."""


class Known:
    """What was found of a packed step by rules that several jobs share, whatever their policies: each is found once."""

    def __init__(self, packed: PackedStep) -> None:
        self.problem = problem_of(packed)
        self._placed = dict[str, tuple[Placement, int | None]]()
        self._guided = dict[tuple[str, int], tuple[PlacementProblem, int]]()

    def placed(self, name: str, find: Callable[[], Placement]) -> tuple[Placement, int | None]:
        """The placement of that name, which fits memory and parity after exchanges; or the row that lacks memory."""
        if name not in self._placed:
            yield_point()
            self._placed[name] = fitted(self.problem, with_parity(self.problem, find()))
        return self._placed[name]

    def guided(self, packed: PackedStep, extra: int, names: Iterable[str]) -> dict[str, tuple[PlacementProblem, int]]:
        """The problems that a search solves from placements of these names (`guided_problem`), and their makespans."""
        names = list(names)
        return dict(zip(names, packed.each([partial(self._guide, packed, extra, n) for n in names]), strict=True))

    def _guide(self, packed: PackedStep, extra: int, name: str) -> tuple[PlacementProblem, int]:
        if (name, extra) not in self._guided:
            start = self._placed[name][0]
            problem = guided_problem(packed, self.problem, extra, start)
            self._guided[name, extra] = problem, makespan_ns(problem, start)
        return self._guided[name, extra]


@dataclass(frozen=True, slots=True)
class Starts:
    """The rule-based placements of a packed step that fit memory."""

    placements: Placements
    """Those by rules, then the same microbatches in the order of DistTrain's Algorithm 2."""
    shortfall: ModuleSpec | None
    """A module whose memory was too small for a placement."""
    is_hopeless: bool
    """Whether memory does not hold one of the sequences, however many microbatches there are."""


def problem_of(packed: PackedStep) -> PlacementProblem:
    """What placing the sequences depends on, with what stages hold where memory is ample."""
    guide, count = _guide(packed, 0, {}), packed.num_microbatches
    return placement_problem(packed.job.spec, guide, packed.samples, packed.sequence, count, packed.parity)


def find_starts(packed: PackedStep, known: Known) -> Starts:
    """Place the sequences by every rule that the job asks for."""
    problem = known.problem
    hopeless = shortfall_alone(problem)
    if hopeless is not None:
        return Starts({}, packed.modules[hopeless], is_hopeless=True)
    balance, order = packed.execution.backbone.balance, packed.layout.order
    by_rules, row = _fitting(packed, known, _by_rules(problem, balance, order))
    moved = {} if order is OrderPolicy.NONE else by_rules
    reordered = {f"{name} + Algorithm 2": partial(in_disttrain_order, problem, p) for name, p in moved.items()}
    by_algorithm_2, later_row = _fitting(packed, known, reordered)
    last = row if later_row is None else later_row
    shortfall = None if last is None else packed.modules[last]
    return Starts({**by_rules, **by_algorithm_2}, shortfall, is_hopeless=False)


def guided_problem(packed: PackedStep, problem: PlacementProblem, extra: int, start: Placement) -> PlacementProblem:
    """The problem with what stages hold under a placement, which must keep fitting memory in a search."""
    budgets = problem.budgets
    if budgets is None:
        return problem if extra == 0 else replace(problem, in_flight=_guide(packed, extra, {}))
    held = _guide(packed, extra, _units(packed, problem, budgets.need, start))
    first, stages = problem.num_encoders, problem.num_stages
    if packed.layout.chunks == 1:
        budgets = replace(budgets, window=np.concatenate([held[: first + 1], held[first + stages :]]))
    return replace(problem, in_flight=held, budgets=budgets)


def _by_rules(problem: PlacementProblem, balance: BalancePolicy, order: OrderPolicy) -> Rules:
    """Those that the job's policies ask for, canonical order first."""
    found: dict[str, Callable[[], Placement]] = {CANONICAL: partial(balanced, problem, BalancePolicy.NONE)}
    if balance is not BalancePolicy.NONE:
        found["longest first"] = partial(balanced, problem, balance)
        if problem.items is not None:
            found |= {name: partial(padded_runs, problem, find) for name, find in PADDED_RUNS.items()}
    if order is OrderPolicy.SEARCH:
        found[STRATIFIED] = partial(stratified, problem)
    if problem.budgets is not None and problem.num_sequences < problem.num_waves * problem.slots * problem.dp:
        found["even waves"] = partial(spread_over_waves, problem)
    return found


def _fitting(packed: PackedStep, known: Known, rules: Rules) -> tuple[Placements, int | None]:
    """Those that fit memory and parity, after exchanges if needed; and the row that lacks memory in the last of the
    others."""
    found, shortfall = {}, None
    placed = packed.each([partial(known.placed, name, rule) for name, rule in rules.items()])
    for name, (fitting, row) in zip(rules, placed, strict=True):
        if row is None:
            found[name] = fitting
        else:
            shortfall = row
    return found, shortfall


def _guide(packed: PackedStep, extra: int, units: Units) -> I64:
    """Microbatches in flight for the search, which knows no chunks. int64 [encoders + stages + generators]."""
    if packed.layout.schedule is not Schedule.INTERLEAVED:
        found = packed.in_flight(extra, units)
        if found is not None:
            return np.concatenate([found.held[m.name] for m in packed.modules])
    places = packed.execution.depths
    vector = one_f_one_b_in_flight(1 + max(int(p.max()) for p in places.values()), extra)
    return np.concatenate([vector[places[m.name]] for m in packed.modules])


def _units(packed: PackedStep, problem: PlacementProblem, need: I64, placement: Placement) -> Units:
    """About what microbatches hold under a placement, images spread evenly over the ranks of a component."""
    found: dict[str, I64] = {}
    held = microbatch_sums(problem, need, placement)
    for row, module in enumerate(packed.modules):
        if row == problem.num_encoders:
            found[module.name] = held[row]
        else:
            waves = held[row].reshape(problem.components, problem.ranks_per_component, -1).sum(axis=1)
            found[module.name] = -(-waves * problem.components // module.dp)
    return found
