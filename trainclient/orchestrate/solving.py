"""The best of every layout, each the best of its own space."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from trainclient.orchestrate.choice import Choice, NoLayoutError, Problem, Solver, TooLargeError
from trainclient.orchestrate.colocated import colocated
from trainclient.orchestrate.contrastive import contrastive, equal_towers
from trainclient.orchestrate.grouped import grouped
from trainclient.orchestrate.job_execution import execution_block, not_run
from trainclient.orchestrate.pipelined import monolithic, pipelined
from trainclient.orchestrate.rescoring import simulated_ns
from trainclient.orchestrate.shortfall import remedy, shortfall

SOLVERS: Final[Mapping[str, Solver]] = MappingProxyType(
    {"pipelined": pipelined, "colocated": colocated, "grouped": grouped, "monolithic": monolithic}
)
"""Of models with a backbone; monolithic is pipelined with the same degrees for all modules, the baseline."""
OF_TOWERS: Final[Mapping[str, Solver]] = MappingProxyType({"contrastive": contrastive, "monolithic": equal_towers})
"""Of towers; monolithic is contrastive with the same degrees for all."""


def solvers_of(problem: Problem) -> Mapping[str, Solver]:
    """The layouts that the modules of a problem can have."""
    return OF_TOWERS if problem.network("tower") else SOLVERS


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
    simulated_ns: float | None = None
    refusal: str | None = None
    """Why planner and simulator have no time of it."""

    @property
    def best_known_ns(self) -> float:
        """As simulated, or else as solved."""
        return self.choice.step_ns if self.simulated_ns is None else self.simulated_ns


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


def solve(problem: Problem, steps: int = 0) -> Solution:
    """Solve the problem in every layout, and score what is found by planner and simulator over so many steps.

    Raises:
        NoLayoutError: no layout fits; says what each lacks.
        ScoringError: a package that planning needs is not installed.
    """
    started = time.perf_counter()
    found: list[Choice] = []
    refused, solvers = dict[str, NoLayoutError](), solvers_of(problem)
    for name, solver in solvers.items():
        try:
            found += solver(problem)
        except NoLayoutError as error:
            refused[name] = error
    solved = time.perf_counter()
    scored = [_scored(problem, choice, steps) for choice in found]
    scored.sort(key=lambda s: (s.best_known_ns, s.choice.gpus))
    scoring_s = time.perf_counter() - solved
    why = {
        name: shortfall(problem, name, solvers[name]) if isinstance(error, TooLargeError) else str(error)
        for name, error in refused.items()
    }
    if not found:
        raise NoLayoutError(f"no layout fits. {'. '.join(why.values())}. {remedy(problem)}")
    return Solution(problem, tuple(scored), why, solved - started, scoring_s)


def _scored(problem: Problem, choice: Choice, steps: int) -> Scored:
    block = execution_block(problem, choice)
    simulated = refusal = None
    if steps:
        try:
            simulated = simulated_ns(problem, choice, block, steps)
        except ValueError as error:
            refusal = str(error)
        except ModuleNotFoundError as error:
            raise ScoringError(
                f"planner and simulator need {error.name}, which data servers have: pip install '.[server]', or set "
                "--steps to 0"
            ) from error
    return Scored(choice, block, not_run(block), simulated, refusal)
