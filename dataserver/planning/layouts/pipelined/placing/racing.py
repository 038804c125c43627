"""A race of searches that begin with orders in which all modules of a rank get on evenly."""

from typing import TYPE_CHECKING

import numpy as np

from dataserver.planning import I64, U64, yield_point
from dataserver.planning.layouts.pipelined.placing.bounds import lower_bound_ns
from dataserver.planning.layouts.pipelined.placing.problem import PlacementProblem
from dataserver.planning.layouts.pipelined.placing.search import (
    OPERATIONS_AT_ONCE,
    ROUNDS_FROM,
    begun,
    budget_of,
    component_operations,
    makespan_ns,
)
from dataserver.planning.layouts.pipelined.placing.seeds import microbatch_sums, with_small_ends
from dataserver.planning.plan.placement import Placement, in_slots, of_slots
from dataserver.planning.stream.randomness import Operator, draws

if TYPE_CHECKING:  # kernels are imported where they are called
    from dataserver.planning.kernels.pipeline import Climb

RACED_WAVES = range(32, 513)
"""Microbatches of a rank for which an even order is worth a search: fewer are ordered well from any start."""

WORTH_SHARE = 256
"""There is no race where no placement can be faster by more than one part in so many."""

RACE_EIGHTHS = 5
"""All searches of a race together may simulate so many eighths of a search's budget."""

HEAT_PARTS = 64
"""Each search of a race first gets one of so many parts of a search's budget; the fastest gets what is left."""

LOST_SHARE = 20
"""A race ends after these first parts where all of its searches are slower than what there is to beat by more than one
part in so many: they would not catch up."""

_PRECISION_BITS = 16
"""Binary places of a microbatch's time over the mean."""


def raced(
    problem: PlacementProblem,
    start: Placement,
    found: Placement,
    step: int,
    seed: int,
    most_sequences: int | None,
    goal: int,
) -> Placement | None:
    """The fastest of searches that begin with the microbatches of a start in even orders, if it is faster than what
    another search found.

    Args:
        problem: with the microbatches in flight for which placements are improved.
        start: its microbatches are those of all searches.
        found: by another search.
        step: its number.
        seed: of the stream.
        most_sequences: see `searched`.
        goal: nanoseconds, see `goal_ns`.
    """
    if not _is_worth(problem):
        return None
    to_beat, bound = makespan_ns(problem, found), lower_bound_ns(problem)
    if to_beat <= max(goal, bound + bound // WORTH_SHARE):
        return None
    budget = budget_of(problem, most_sequences)
    words = draws(seed, Operator.PLAN_SEARCH, 0, 1, step, 2 * budget)
    heat, left = budget // HEAT_PARTS, RACE_EIGHTHS * budget // 8
    runners = [_Runner(problem, placement, words) for placement in even_orders(problem, start)]
    for runner in runners:
        left -= runner.go_on(heat, goal)
    best = min(runners, key=lambda runner: runner.makespan_ns)
    if best.makespan_ns <= to_beat + to_beat // LOST_SHARE:
        best.go_on(left, goal)
    return best.placement if best.makespan_ns < to_beat else None


def _is_worth(problem: PlacementProblem) -> bool:
    """Whether each rank is a component, there are few, with many microbatches each, and neither memory nor parity says
    which of them may follow each other."""
    return (
        problem.num_waves in RACED_WAVES
        and problem.components < ROUNDS_FROM
        and problem.ranks_per_component == 1
        and problem.budgets is None
        and problem.images is None
    )


class _Runner:
    """One search of a race."""

    def __init__(self, problem: PlacementProblem, start: Placement, words: U64) -> None:
        self._slots = in_slots(problem.shape, start)
        self._climb: Climb = begun(problem, self._slots)
        self._words = words
        self._at_once = max(1, OPERATIONS_AT_ONCE // component_operations(problem))

    @property
    def makespan_ns(self) -> int:
        """Simulated time of the slowest component, so far."""
        return self._climb.makespan_ns

    @property
    def placement(self) -> Placement:
        """What was found so far."""
        return of_slots(self._slots)

    def go_on(self, budget: int, goal: int) -> int:
        """Simulate so many components more, unless the goal is reached; how many were."""
        from dataserver.planning.kernels.pipeline import go_on

        left = budget
        while left > 0 and len(self._words) and self.makespan_ns > goal:
            yield_point()
            simulated, used = go_on(self._climb, self._words, min(left, self._at_once), goal)
            left, self._words = left - simulated, self._words[used:]
        return budget - left


def even_orders(problem: PlacementProblem, start: Placement) -> list[Placement]:
    """The microbatches of each rank so that what every module has done is near the mean after each: forwards and
    backwards, as they are and with small ends."""
    order = _even(microbatch_sums(problem, problem.own, start))
    found = []
    for own in (order, order[:, ::-1]):
        position = np.argsort(own, axis=1)
        even = Placement(start.rank, position[start.rank, start.wave], start.slot)
        found += [even, with_small_ends(problem, even)]
    return found


def _even(times: I64) -> I64:
    """Microbatches of each rank, int64 [ranks, waves]: next is always the one after which the times taken so far,
    int64 [rows, ranks, waves], over their means, are nearest to those of as many mean ones (least squares over rows).

    In whole numbers, so that every machine finds the same.
    """
    _, ranks, waves = times.shape
    total = times.sum(axis=2, keepdims=True)
    shift = max(0, int(total.max(initial=0)).bit_length() - 32)
    times, total = times >> shift, np.maximum(1, total >> shift)
    beyond = (times * waves << _PRECISION_BITS) // total - (1 << _PRECISION_BITS)
    so_far, rank = np.zeros_like(total), np.arange(ranks)
    order, left = np.empty((ranks, waves), np.int64), np.ones((ranks, waves), bool)
    for number in range(waves):
        distance = np.where(left, ((so_far + beyond) ** 2).sum(axis=0), np.iinfo(np.int64).max)
        order[:, number] = distance.argmin(axis=1)
        left[rank, order[:, number]] = False
        so_far += beyond[:, rank, order[:, number]][:, :, None]
    return order
