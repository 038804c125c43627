"""Every solver finds what trying its whole space finds, and says that nothing fits where nothing does."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from orchestration.exhaustive import best_colocated, best_grouped, best_monolithic, best_pipelined, best_towers
from orchestration.instances import random_problem, random_towers, with_more_encoders

from trainclient.orchestrate.choice import Choice, Problem, TooLargeError
from trainclient.orchestrate.solving import solvers_of

SEARCHES = {
    "pipelined": best_pipelined,
    "colocated": best_colocated,
    "grouped": best_grouped,
    "monolithic": best_monolithic,
}
SEARCHES_OF_TOWERS = {
    "contrastive": partial(best_towers, tied=False),
    "monolithic": partial(best_towers, tied=True),
}


def equal(layout: str, problem: Problem, search: Callable[[Problem], float]) -> Choice | None:
    """The solver's best, which is that of the search; None where nothing fits, and both say so."""
    solver = solvers_of(problem)[layout]
    best = search(problem)
    if best == float("inf"):
        with pytest.raises(TooLargeError):
            solver(problem)
        return None
    found = solver(problem)[0]
    assert found.step_ns == pytest.approx(best, rel=1e-9)
    assert found.memory_bytes <= problem.cluster.memory_bytes
    return found


def both(layout: str, problem: Problem, search: Callable[[Problem], float]) -> list[Choice]:
    """The best with the memory that there is, and with a fifth less than that choice takes."""
    found = equal(layout, problem, search)
    if found is None:
        return []
    less = replace(problem, cluster=replace(problem.cluster, memory_bytes=int(0.8 * found.memory_bytes)))
    short = equal(layout, less, search)
    return [found] if short is None else [found, short]


@pytest.mark.parametrize(("count", "least"), [(12, 10), pytest.param(30, 20, marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", SEARCHES)
def test_solvers_equal_exhaustive_search(layout: str, count: int, least: int) -> None:
    found = [both(layout, random_problem(seed, 10), SEARCHES[layout]) for seed in range(count)]
    solved = [choice for choices in found for choice in choices]
    assert [] in found
    assert len(solved) > least
    if layout != "grouped":
        assert any(choice.microbatch % 3 == 0 for choice in solved)
        assert layout == "colocated" or any(choice.finer > 1 for choice in solved)
    if layout in ("pipelined", "monolithic"):
        assert any(choice.chunks > 1 for choice in solved)


def equal_with_several_encoders(layout: str, seeds: range) -> set[int]:
    """The numbers of encoders of what was found."""
    problems = [with_more_encoders(random_problem(seed, 10), seed) for seed in seeds]
    found = [choice for problem in problems for choice in both(layout, problem, SEARCHES[layout])]
    return {sum(m.option.network.role.feeds for m in choice.modules) for choice in found}


def test_solvers_with_several_encoders_equal_exhaustive_search() -> None:
    assert equal_with_several_encoders("pipelined", range(4)) == {2, 3}
    assert equal_with_several_encoders("colocated", range(2))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", SEARCHES)
def test_all_solvers_with_several_encoders_equal_exhaustive_search(layout: str) -> None:
    assert equal_with_several_encoders(layout, range(100)) >= {2, 3}


@pytest.mark.parametrize("layout", SEARCHES_OF_TOWERS)
def test_solvers_of_towers_equal_exhaustive_search(layout: str) -> None:
    found = [both(layout, random_towers(seed, 10), SEARCHES_OF_TOWERS[layout]) for seed in range(30)]
    solved = [choice for choices in found for choice in choices]
    assert [] in found
    assert len(solved) > 20
    assert any("microbatches" in choice.extras for choice in solved)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", SEARCHES)
def test_solvers_equal_exhaustive_search_up_to_64_gpus(layout: str) -> None:
    found = [equal(layout, random_problem(seed, 64), SEARCHES[layout]) for seed in range(1000, 1300)]
    assert sum(choice is not None for choice in found) > 150


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", SEARCHES_OF_TOWERS)
def test_solvers_of_towers_equal_exhaustive_search_up_to_64_gpus(layout: str) -> None:
    found = [equal(layout, random_towers(seed, 64), SEARCHES_OF_TOWERS[layout]) for seed in range(1000, 1300)]
    assert sum(choice is not None for choice in found) > 150
