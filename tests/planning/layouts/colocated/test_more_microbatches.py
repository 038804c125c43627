"""Where memory is stated, a colocated step is also tried in more and smaller microbatches than it asks for."""

import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from builders.jobs import in_version
from builders.matrix import matrix, samples_of

from dataserver.planning.job import limits
from dataserver.planning.job.fields import PLAN_LIMITS
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.colocated import planner
from dataserver.planning.layouts.colocated.rounds import StepRounds, arrange_step
from dataserver.planning.plan.naming import milliseconds
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import timeline
from dataserver.planning.stream.samples import StepSamples

NUMBERS = *range(100, 125), 1_008, 1_046, 1_049
"""Jobs of the matrix; most of them state memory. More microbatches are faster in the last three."""


def steps(*, memory: bool) -> list[tuple[Job, StepSamples, StepPlan]]:
    """Jobs that state memory or none, with a step that can be planned, and its plan by version 7."""
    found = []
    for job, tables in (matrix("colocated", number) for number in NUMBERS):
        samples = samples_of(job, tables)
        if any(m.memory is not None for m in job.spec.execution.modules) is memory:
            try:
                found.append((job, samples, planner.plan(in_version(job, 7), 3, samples)))
            except ValueError:
                continue
    return found


def makespan(job: Job, plan: StepPlan) -> int:
    return timeline(job.spec, plan).makespan_ns


def asked(monkeypatch: pytest.MonkeyPatch, job: Job, samples: StepSamples) -> tuple[StepPlan, list[tuple[int, int]]]:
    """A plan; the least number of microbatches of each try, 0 where any will do, and what came of it, 0 for nothing."""
    found = list[tuple[int, int]]()

    def recorded(job: Job, samples: StepSamples, at_least: int = 0) -> tuple[StepRounds, int]:
        found.append((at_least, 0))
        arranged = arrange_step(job, samples, at_least)
        found[-1] = at_least, arranged[0].num_microbatches
        return arranged

    with monkeypatch.context() as patch:
        patch.setattr(planner, "arrange_step", recorded)
        return planner.plan(job, 3, samples), found


def times_of(plan: StepPlan, numbers: list[int]) -> list[int]:
    """The least time of each number of microbatches; candidates of all but the first are named after theirs."""
    first = min(c.makespan_ns for c in plan.candidates if not c.name.endswith(" microbatches"))
    named = [[c for c in plan.candidates if c.name.endswith(f", {number} microbatches")] for number in numbers[1:]]
    return [first, *(min(c.makespan_ns for c in some) for some in named)]


def test_more_microbatches_are_taken_only_where_they_are_faster() -> None:
    more = 0
    for job, samples, old in steps(memory=True):
        plan = planner.plan(job, 3, samples)
        assert plan.num_microbatches >= old.num_microbatches
        if plan.num_microbatches == old.num_microbatches:
            assert makespan(job, plan) == makespan(job, old)
            assert plan.decisions == old.decisions
            continue
        more += 1
        assert makespan(job, plan) < makespan(job, old)
        (said,) = [d for d in plan.decisions if d.chosen.endswith("microbatches of each rank")]
        assert said.chosen.startswith(f"{plan.num_microbatches} ")
        times = [milliseconds(makespan(job, p)) for p in (plan, old)]
        assert said.reason == f"simulated {times[0]}, against {times[1]} with {old.num_microbatches}"
    assert more == 3


def test_numbers_rise_as_long_as_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is at least one more than the last, from 16 on an eighth more."""
    monkeypatch.setattr(planner, "bound_ns", lambda *_: -1)  # as if no plan was near its bound
    ends = 0
    for job, samples, _ in steps(memory=True):
        plan, ((first, number), *others) = asked(monkeypatch, job, samples)
        numbers = [number]
        assert first == 0
        for least, count in others:
            assert least == number + max(1, number // 8)
            assert count == 0 or count >= least
            number = count or least
            numbers += [count] * (count > 0)
        if number >= len(samples) or others[-1][1] == 0:
            continue
        ends += 1
        times = times_of(plan, numbers)
        assert times[-1] >= times[-2]
        assert all(fewer > more for fewer, more in pairwise(times[:-1]))
    assert ends > 5


def test_nothing_more_is_tried_within_a_twentieth_of_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    job, samples, old = next(s for s in steps(memory=True) if len(s[1]) > s[2].num_microbatches)
    least = -(-20 * makespan(job, old) // 21)
    for bound, number in ((least, 1), (least - 1, 2)):
        monkeypatch.setattr(planner, "bound_ns", lambda *_, bound=bound: bound)
        assert len(asked(monkeypatch, job, samples)[1][:2]) == number


def test_without_memory_plans_are_those_of_version_7(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "bound_ns", lambda *_: -1)
    found = steps(memory=False)
    assert found
    for job, samples, old in found:
        plan, numbers = asked(monkeypatch, job, samples)
        assert len(numbers) == 1
        assert (plan.candidates, plan.decisions) == (old.candidates, old.decisions)


def test_more_than_a_step_may_have_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there may be no more microbatches than memory asks for, these are planned as by version 7."""
    monkeypatch.setattr(planner, "bound_ns", lambda *_: -1)
    job, samples, old = next(s for s in steps(memory=True) if len(s[1]) > s[2].num_microbatches)
    most = replace(PLAN_LIMITS[8], step_microbatches=old.num_microbatches)
    monkeypatch.setattr(limits, "PLAN_LIMITS", {8: most})
    plan, numbers = asked(monkeypatch, job, samples)
    assert [count for _, count in numbers] == [old.num_microbatches, 0]
    assert (plan.num_microbatches, makespan(job, plan)) == (old.num_microbatches, makespan(job, old))
    assert plan.candidates == old.candidates


def test_plans_that_are_not_chosen_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many numbers are tried: each plan has arrays of all ranks and microbatches."""
    made, held, candidate = list[Any](), list[int](), planner._candidate

    def recorded(*arguments: Any) -> Any:
        found = candidate(*arguments)
        made.append(weakref.ref(found.planned.timeline.start_ns))
        held.append(sum(one() is not None for one in made))
        return found

    job, samples, _ = max(steps(memory=True), key=lambda step: len(step[1]))
    with monkeypatch.context() as patch:
        patch.setattr(planner, "bound_ns", lambda *_: -1)
        patch.setattr(planner, "_candidate", recorded)
        # as if more microbatches were always faster
        patch.setattr(planner._CandidatePlan, "makespan_ns", property(lambda of: 1_000 - of.rounds.num_microbatches))
        plan = planner.plan(job, 3, samples)
    assert len(plan.candidates) == len(made) > 12
    numbers = sorted({int(c.name.split()[-2]) for c in plan.candidates if c.name.endswith(" microbatches")})
    assert {16, 18, 20, 22, 24, 27} < set(numbers), "from 16 on an eighth more"
    assert not {17, 19, 25} & set(numbers)
    assert max(held) <= 6
