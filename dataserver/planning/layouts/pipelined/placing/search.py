"""Placements that fit the memory, and their improvement by bounded search."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dataserver.planning import I64, U64, cores, side_by_side, yield_point
from dataserver.planning.layouts.pipelined.placing.bounds import work_bound_ns
from dataserver.planning.layouts.pipelined.placing.problem import PlacementProblem
from dataserver.planning.plan.placement import Placement, in_slots, of_slots
from dataserver.planning.stream.randomness import Operator, draws

if TYPE_CHECKING:  # kernels are imported where they are called
    from dataserver.planning.kernels.components import Costs
    from dataserver.planning.kernels.pipeline import Climb

SEARCH_OPERATIONS = 4_400
"""Operations that a search may simulate for each sequence and pipeline stage: in all about 10 us for each of them, so
that planning time grows with the step and no faster."""

RESERVED_OPERATIONS = 800_000
"""Subtracted from these, at most half of them: about the time that any plan takes beside its search, however small."""

GOAL_SHARE = 4_096
"""A search is at its goal where no placement can be faster by more than one part in so many. One rank of few stages
comes that near in a sixth of its budget, where each part that is left costs as much as all before."""

NO_GOAL = -1
"""A search with it uses up its budget."""

PATIENCE_PARTS, PATIENCE_SHARE = 8, 1_024
"""A search without patience ends where one of so many parts of its budget made the slowest component faster by less
than one part in so many. That saves up to half of the time of a plan of few stages, for 0.1 % of its makespan."""

FITTING_LOOKS = 32
"""Exchanges that may be tried for each sequence to make a placement fit the memory."""

OPERATIONS_AT_ONCE = 1 << 21
"""Operations that are simulated between two yield points: some ten milliseconds."""

ROUND_OPERATIONS = 1 << 21
"""Operations that are simulated between two orders of the components, by all threads together."""

FEWEST_ROUNDS = 64
"""Rounds of a search that uses up its budget, however small, so that every component meets many others."""

LEAST_OF_A_ROUND = 16
"""A round counts for one part in so many of what it may simulate, so that rounds end where pairs need little."""

ROUNDS_FROM = 4
"""The fewest components that are improved in pairs."""

LOOKS_AT_ONCE = 1 << 14
"""Exchanges that are tried between two yield points, where a component has one backbone rank; else so many fewer."""


def goal_ns(problem: PlacementProblem) -> int:
    """Simulated time of the slowest component, by the work alone, so near the best one that a search ends with it."""
    bound = work_bound_ns(problem)
    return bound + bound // GOAL_SHARE


def searched(
    problem: PlacementProblem,
    start: Placement,
    step: int,
    seed: int,
    most_sequences: int | None = None,
    goal: int = NO_GOAL,
    *,
    patient: bool = True,
    in_rounds: bool = False,
) -> Placement:
    """Improve a placement by bounded hill climbing on the slowest component.

    Assignment, composition and order change together (`kernels.pipeline.improve_placement`); what fits the memory keeps
    fitting.

    Args:
        problem: with the microbatches in flight for which it is improved.
        start: a placement within the memory.
        step: its number.
        seed: of the stream.
        most_sequences: that the budget is for, where memory divides what fewer sequences could hold; all by default.
        goal: nanoseconds, see `goal_ns`.
        patient: whether it uses up its budget even where it gains next to nothing any more (`PATIENCE_PARTS`).
        in_rounds: whether many components are improved in pairs, which threads may share.
    """
    budget = budget_of(problem, most_sequences)
    best = in_slots(problem.shape, start)
    part = None if patient else max(1, budget // PATIENCE_PARTS)
    if in_rounds and problem.components >= ROUNDS_FROM:

        def words_of(number: int, count: int) -> U64:
            return draws(seed, Operator.PLAN_SEARCH, 0, number, step, count)

        _improve_in_rounds(problem, best, words_of, budget, goal, part or budget)
    else:
        _improve(problem, best, draws(seed, Operator.PLAN_SEARCH, 0, 0, step, 2 * budget), budget, goal, part)
    return of_slots(best)


def budget_of(problem: PlacementProblem, most_sequences: int | None = None) -> int:
    """Components that a search simulates at most, for all sequences or so many of them."""
    ends = len(problem.base) - 1
    count = problem.num_sequences if most_sequences is None else min(most_sequences, problem.num_sequences)
    allowed = SEARCH_OPERATIONS * count * (problem.num_stages + ends)
    allowed -= min(RESERVED_OPERATIONS, allowed // 2)
    return allowed // component_operations(problem)


def makespan_ns(problem: PlacementProblem, placement: Placement) -> int:
    """Simulated time of the slowest component."""
    return begun(problem, in_slots(problem.shape, placement)).makespan_ns


def shortfall_alone(problem: PlacementProblem) -> int | None:
    """A row whose memory does not hold one of the sequences even alone; None if there is none."""
    if problem.budgets is None:
        return None
    most, budget = problem.budgets.need.max(axis=1), problem.budgets.budget
    shortfall = (budget >= 0) & (most > budget)
    return int(shortfall.argmax()) if shortfall.any() else None


def fitted(problem: PlacementProblem, placement: Placement) -> tuple[Placement, int | None]:
    """The placement, with as many exchanges as it takes until memory holds every microbatch.

    Returns:
        The placement; and if memory does not hold it, the row that lacks most.
    """
    from dataserver.planning.kernels.components import slots_of
    from dataserver.planning.kernels.fitting import fit_placement

    if problem.budgets is None:
        return placement, None
    costs = _costs(problem)
    slots = slots_of(in_slots(problem.shape, placement), costs)
    state = np.array([problem.dp * problem.num_waves, 0, 1, *[0] * 7], np.int64)
    budget, at_once = FITTING_LOOKS * problem.num_sequences, max(1, LOOKS_AT_ONCE // problem.ranks_per_component)
    shortfall, left = fit_placement(slots, costs, budget, at_once, state)
    while left:
        yield_point()
        shortfall, left = fit_placement(slots, costs, budget, at_once, state)
    return of_slots(slots.at), int(shortfall.argmax()) if shortfall.any() else None


def _improve(
    problem: PlacementProblem, slots: I64, words: U64, budget: int, goal: int = NO_GOAL, part: int | None = None
) -> None:
    """Improve `slots` in place with at most `budget` simulated components, or to the goal.

    It ends early where one `part` of the budget, if given, gained too little.
    """
    from dataserver.planning.kernels.pipeline import go_on

    climb, at_once = begun(problem, slots), max(1, OPERATIONS_AT_ONCE // component_operations(problem))
    words_at_once = max(1, OPERATIONS_AT_ONCE // problem.components)  # each looks for the slowest component
    left = budget - problem.components
    patience = _Patience(climb.makespan_ns, left, budget if part is None else part)
    while left > 0 and len(words) and climb.makespan_ns > goal:
        yield_point()
        simulated, used = go_on(climb, words[:words_at_once], min(left, at_once, left - patience.due), goal)
        left, words = left - simulated, words[used:]
        if patience.ends(climb.makespan_ns, left):
            break


def _improve_in_rounds(
    problem: PlacementProblem, slots: I64, draw: Callable[[int, int], U64], budget: int, goal: int, part: int
) -> None:
    """The same for many components: in each round the slowest exchanges with the fastest, the second slowest with the
    second fastest, and so on, each pair until it is no slower than half of the components were.

    So no pair waits for another one, and threads share them; what is found does not depend on how many there are.

    Args:
        problem: of four components or more.
        slots: of the placement.
        draw: the words of a round, so many.
        budget: components that are simulated, at most.
        goal: nanoseconds.
        part: of the budget.
    """
    from dataserver.planning.kernels.pipeline import go_on_in

    climb = begun(problem, slots)
    at_once = max(1, min(ROUND_OPERATIONS // component_operations(problem), budget // FEWEST_ROUNDS))
    half, left = problem.components // 2, budget - problem.components
    patience, number = _Patience(climb.makespan_ns, left, part), 0
    while left > 0 and climb.makespan_ns > goal:
        yield_point()
        order, number = np.argsort(-climb.makespan, kind="stable"), number + 1
        pairs, each = np.stack([order[:half], order[: -half - 1 : -1]], axis=1), max(1, min(left, at_once) // half)
        slowest, enough = climb.makespan_ns, int(climb.makespan[order[half]])
        words = draw(number, 2 * each * half).reshape(half, -1)
        target = max(goal, min(enough, slowest - 1))
        count = min(cores(), half)
        parts = [
            partial(go_on_in, climb, pairs[n::count].copy(), words[n::count].copy(), each, target) for n in range(count)
        ]
        spent = side_by_side(parts, count)
        simulated, used = (sum(counts) for counts in zip(*spent, strict=True))  # over all parts alike
        left -= max(simulated, used // 2, at_once // LEAST_OF_A_ROUND, 1)
        if patience.ends(climb.makespan_ns, left):
            break


def begun(problem: PlacementProblem, slots: I64) -> "Climb":
    """A climb whose components are all simulated."""
    from dataserver.planning.kernels.pipeline import climb_of, go_on

    climb, at_once = climb_of(slots, _costs(problem)), max(1, OPERATIONS_AT_ONCE // component_operations(problem))
    while not climb.is_ready:
        yield_point()
        go_on(climb, np.zeros(0, np.uint64), at_once)
    return climb


class _Patience:
    """Ends a search where one part of its budget made the slowest component faster by next to nothing."""

    def __init__(self, makespan_ns: int, left: int, part: int) -> None:
        self._last, self._part = makespan_ns, part
        self.due = left - part
        """What is left of the budget when it is time for a look."""

    def ends(self, makespan_ns: int, left: int) -> bool:
        """Whether it is time for one, and too little was gained."""
        if left > self.due:
            return False
        gained, self._last, before = self._last - makespan_ns, makespan_ns, self._last
        self.due = left - self._part
        return gained < before // PATIENCE_SHARE


def component_operations(problem: PlacementProblem) -> int:
    """About what it takes to simulate a component."""
    ends = len(problem.base) - 1
    in_component = 2 * (problem.num_stages * problem.ranks_per_component + ends)
    return in_component * (problem.num_waves + problem.num_stages + ends)


def _costs(problem: PlacementProblem) -> "Costs":
    from dataserver.planning.kernels.components import Costs

    none = np.zeros(0, np.int64)
    return Costs(
        own=problem.own,
        base=problem.base,
        percent=problem.percent,
        items=none if problem.items is None else problem.items,
        need=none.reshape(0, 0) if problem.budgets is None else problem.budgets.need,
        budget=none if problem.budgets is None else problem.budgets.budget,
        window=none if problem.budgets is None else problem.budgets.window,
        in_flight=_passed(problem),
        transfer=np.zeros_like(problem.base) if problem.transfers is None else problem.transfers.usual,
        transfer_back=np.zeros_like(problem.base)
        if problem.transfers is None
        else problem.transfers.usual * problem.transfers.returned,
        encoders=problem.num_encoders,
        ranks_per_component=problem.ranks_per_component,
        whole=problem.whole,
        images=none if problem.images is None else problem.images,
    )


def _passed(problem: PlacementProblem) -> I64:
    """What the loops take for in flight: what stages hold, and all microbatches where no backward is run.

    The backwards there, which take no time, then come behind all forwards and keep none of them waiting, and behind
    those of the stages that they feed.
    """
    if problem.returns is None or problem.returns.all():
        return problem.in_flight
    return np.where(problem.returns, problem.in_flight, max(problem.num_waves, int(problem.in_flight.max())))
