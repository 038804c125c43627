"""The best of every layout, each the best of its own space."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from dataserver.extras import pip_install
from trainclient.layouts.registry import LAYOUTS, layout_part
from trainclient.orchestrate.choice import Choice, NoLayoutError, Problem, Solver, TooLargeError
from trainclient.orchestrate.job_execution import execution_block, not_run
from trainclient.orchestrate.rescoring import Simulated, simulate
from trainclient.orchestrate.shortfall import remedy, shortfall

MONOLITHIC: Final = "monolithic"
"""Name that results give the baseline."""


def solvers(*, has_backbone: bool) -> Mapping[str, Solver]:
    """The layouts of models with a backbone, or of towers, and last the baseline."""
    of_layouts = {kind: layout_part(kind, "degrees").DEGREES for kind in LAYOUTS}
    found = {kind: degrees for kind, degrees in of_layouts.items() if degrees.has_backbone == has_backbone}
    baseline = next(degrees.equal for degrees in found.values() if degrees.equal is not None)
    return {kind: degrees.best for kind, degrees in found.items()} | {MONOLITHIC: baseline}


def solvers_of(problem: Problem) -> Mapping[str, Solver]:
    """The layouts that the modules of a problem can have."""
    return solvers(has_backbone=problem.network("tower") is None)


DRAWS: Final = 3
"""Draws of samples that the `CLOSEST` choices are planned and simulated for, on up to `LARGE` GPUs."""
CLOSEST: Final = 2
"""Choices, the fastest of one draw, between which more draws decide: planning every choice for all takes minutes."""
LARGE: Final = 128
"""GPUs beyond which planning takes seconds: then the best choice of each layout is scored, for one draw."""
HOPELESS: Final = 1.25
"""Times the fastest simulated step that a solved one takes which is not planned, if samples are packed: then simulated
steps took at least 0.81 of solved ones. On up to `LARGE` GPUs the best choice of each layout always is."""


class ScoringError(ValueError):
    """Choices cannot be scored on this machine."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A choice with what else is known of it."""

    choice: Choice
    block: Mapping[str, Any]
    """The `execution` of a job."""
    not_run: str | None
    """Why the trainer does not run it yet."""
    simulated: Simulated | None
    refusal: str | None
    """Why planner and simulator have no time of it."""

    @property
    def simulated_ns(self) -> float | None:
        """The mean of all draws."""
        return None if self.simulated is None else self.simulated.mean_ns

    @property
    def best_known_ns(self) -> float:
        """Time of a step as simulated, or else as solved."""
        return self.choice.step_ns if self.simulated is None else self.simulated.mean_ns


@dataclass(frozen=True, slots=True)
class Solution:
    """The best choices of all layouts, the fastest first."""

    problem: Problem
    scored: tuple[Scored, ...]
    refused: Mapping[str, str]
    """Layouts without a choice, and why."""
    solving_s: float
    scoring_s: float

    @property
    def ready(self) -> Scored | None:
        """The fastest that the trainer runs."""
        return next((s for s in self.scored if s.not_run is None), None)


def solve(problem: Problem, draws: int | None = None) -> Solution:
    """Solve the problem in every layout, and score what is found by planner and simulator over so many draws.

    Without a number, the best three of each layout are scored once, but for `HOPELESS` ones, and the `CLOSEST`
    for `DRAWS`; on a `LARGE` cluster the best of each layout, once.

    Raises:
        NoLayoutError: no layout fits; says what each lacks.
        ScoringError: a package that planning needs is not installed.
    """
    started = time.perf_counter()
    found: list[Choice] = []
    few = draws is None and problem.cluster.gpus > LARGE
    refused, solvers = dict[str, NoLayoutError](), solvers_of(problem)
    for name, solver in solvers.items():
        try:
            found += solver(problem)[: 1 if few else None]
        except NoLayoutError as error:
            refused[name] = error
    solved = time.perf_counter()
    scored = _all_scored(problem, found, draws)
    if draws is None and not few:
        scored = [_drawn_again(problem, s) for s in scored[:CLOSEST]] + scored[CLOSEST:]
        scored.sort(key=_speed)
    scoring_s = time.perf_counter() - solved
    why = {
        name: shortfall(problem, name, solvers[name]) if isinstance(error, TooLargeError) else str(error)
        for name, error in refused.items()
    }
    if not found:
        raise NoLayoutError(f"no layout fits. {'. '.join(why.values())}. {remedy(problem)}")
    return Solution(problem, tuple(scored), why, solved - started, scoring_s)


def _all_scored(problem: Problem, found: Sequence[Choice], draws: int | None) -> list[Scored]:
    """The fastest first; without a number of draws, what is hopelessly slow as solved alone."""
    scored, seen = list[Scored](), set[str]()
    for choice in sorted(found, key=lambda c: c.step_ns):
        fastest = min((s.best_known_ns for s in scored), default=float("inf"))
        prunes = draws is None and (choice.layout in seen or problem.cluster.gpus > LARGE)
        hopeless = prunes and problem.workload.stream.packed and choice.step_ns > HOPELESS * fastest
        scored.append(_scored(problem, choice, 0 if hopeless else 1 if draws is None else draws))
        seen.add(choice.layout)
    return sorted(scored, key=_speed)


def _speed(scored: Scored) -> tuple[float, int]:
    return scored.best_known_ns, scored.choice.gpus


def _drawn_again(problem: Problem, scored: Scored) -> Scored:
    """The same over `DRAWS`, if it was simulated for one."""
    if scored.simulated is None:
        return scored
    more = simulate(problem, scored.choice, scored.block, range(1, DRAWS))
    return replace(scored, simulated=scored.simulated.plus(more))


def _scored(problem: Problem, choice: Choice, draws: int) -> Scored:
    block = execution_block(problem, choice)
    simulated = refusal = None
    if draws:
        try:
            simulated = simulate(problem, choice, block, range(draws))
        except ValueError as error:
            refusal = str(error)
        except ModuleNotFoundError as error:
            raise ScoringError(
                f"planner and simulator need {error.name}, which data servers have: {pip_install('server')}, or set "
                "--steps to 0"
            ) from error
    return Scored(choice, block, not_run(block), simulated, refusal)
