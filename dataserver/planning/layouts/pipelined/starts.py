"""Rule-based placements that fit memory, and the problem that a search solves from one of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.job.fields import BalancePolicy, ModuleSpec, OrderPolicy, Schedule
from dataserver.planning.layouts.pipelined.interleaving import stages_in_flight
from dataserver.planning.layouts.pipelined.packed import PackedStep
from dataserver.planning.layouts.pipelined.placing import (
    Placement,
    PlacementProblem,
    balanced,
    fitted,
    in_disttrain_order,
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


@dataclass(frozen=True, slots=True)
class Starts:
    """The rule-based placements of a packed step that fit memory."""

    problem: PlacementProblem
    by_rules: Placements
    by_algorithm_2: Placements
    """The same microbatches in the order of DistTrain's Algorithm 2."""
    shortfall: ModuleSpec | None
    """A module whose memory was too small for a placement."""
    is_hopeless: bool
    """Whether memory does not hold one of the sequences, however many microbatches there are."""


def problem_of(packed: PackedStep) -> PlacementProblem:
    """What placing the sequences depends on, with what stages hold where memory is ample."""
    guide, count = _guide(packed, 0, {}), packed.num_microbatches
    return placement_problem(packed.job.spec, guide, packed.samples, packed.sequence, count, packed.parity)


def find_starts(packed: PackedStep, problem: PlacementProblem) -> Starts:
    """Place the sequences by every rule that the job asks for. `problem` is that of `problem_of`."""
    hopeless = shortfall_alone(problem)
    if hopeless is not None:
        return Starts(problem, {}, {}, packed.modules[hopeless], is_hopeless=True)
    balance, order = packed.execution.backbone.balance, packed.layout.order
    by_rules, row = _fitting(problem, _by_rules(problem, balance, order))
    moved = {} if order is OrderPolicy.NONE else by_rules
    reordered = {f"{name} + Algorithm 2": in_disttrain_order(problem, p) for name, p in moved.items()}
    by_algorithm_2, later_row = _fitting(problem, reordered)
    last = row if later_row is None else later_row
    shortfall = None if last is None else packed.modules[last]
    return Starts(problem, by_rules, by_algorithm_2, shortfall, is_hopeless=False)


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


def _by_rules(problem: PlacementProblem, balance: BalancePolicy, order: OrderPolicy) -> Placements:
    """Those that the job's policies ask for, canonical order first."""
    found = {CANONICAL: balanced(problem, BalancePolicy.NONE)}
    if balance is not BalancePolicy.NONE:
        found["longest first"] = balanced(problem, balance)
        if problem.items is not None:
            found |= padded_runs(problem)
    if order is OrderPolicy.SEARCH:
        found[STRATIFIED] = stratified(problem)
    if problem.budgets is not None and problem.num_sequences < problem.num_waves * problem.slots * problem.dp:
        found["even waves"] = spread_over_waves(problem)
    return found


def _fitting(problem: PlacementProblem, placements: Placements) -> tuple[Placements, int | None]:
    """Those that fit memory and parity, after exchanges if needed; and the row that lacks memory in the last of the
    others."""
    found, shortfall = {}, None
    for name, placement in placements.items():
        yield_point()
        fitting, row = fitted(problem, with_parity(problem, placement))
        if row is None:
            found[name] = fitting
        else:
            shortfall = row
    return found, shortfall


def _guide(packed: PackedStep, extra: int, units: Units) -> I64:
    """Microbatches in flight for the search, which knows no chunks. int64 [encoders + stages + generators]."""
    if packed.layout.schedule is not Schedule.INTERLEAVED:
        found = stages_in_flight(packed.execution, packed.num_microbatches, extra, units)
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
