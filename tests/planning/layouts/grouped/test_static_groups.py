"""Groups of the largest degree, beside encoders also sought for less memory than devices have."""

import re

import pytest
from builders.jobs import in_version
from builders.matrix import matrix, samples_of

from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.grouped import planner
from dataserver.planning.layouts.grouped.options import GroupedOptions, GroupPolicy
from dataserver.planning.layouts.grouped.sequences import rank_tokens
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import timeline

NUMBERS = range(100, 180)
"""Jobs of the matrix; about a quarter have static groups."""
LESS = re.compile(r"static groups in ([\d,]+) tokens of a device")


def options(job: Job) -> GroupedOptions:
    return job.spec.execution.options(GroupedOptions)


def memory_of(job: Job) -> int:
    """Tokens that fit on a device."""
    memory = job.spec.execution.backbone.memory
    assert memory is not None
    return memory.units


@pytest.fixture(scope="module")
def plans() -> list[tuple[Job, StepPlan, StepPlan]]:
    """Jobs with static groups, their plans, and those by version 7."""
    found = []
    for job, tables in (matrix("grouped", number) for number in NUMBERS):
        if options(job).policy is GroupPolicy.STATIC:
            samples = samples_of(job, tables)
            found.append((job, *(planner.plan(in_version(job, version), 3, samples) for version in (8, 7))))
    return found


def tokens_of(plan: StepPlan) -> list[int]:
    """The memory that its candidates were sought for."""
    return [int(number.replace(",", "")) for c in plan.candidates for number in LESS.findall(c.name)]


def test_they_are_sought_for_less_memory_since_version_8(plans: list[tuple[Job, StepPlan, StepPlan]]) -> None:
    """Powers of two, and one and a half times these."""
    sizes = {size for power in range(20) for size in (1 << power, 3 << power)}
    assert not any(tokens_of(old) for _, _, old in plans)
    assert any(tokens_of(new) for _, new, _ in plans)
    for job, new, _ in plans:
        assert set(tokens_of(new)) <= {size for size in sizes if size < memory_of(job)}


def test_what_version_7_compares_is_compared_too(plans: list[tuple[Job, StepPlan, StepPlan]]) -> None:
    """So no plan is slower; some are faster."""
    faster = 0
    for job, new, old in plans:
        assert set(old.candidates) <= set(new.candidates)
        times = [timeline(job.spec, plan).makespan_ns for plan in (new, old)]
        assert times[0] <= times[1]
        faster += times[0] < times[1]
    assert faster


def test_they_have_the_largest_degree_and_keep_within_memory(plans: list[tuple[Job, StepPlan, StepPlan]]) -> None:
    for job, new, _ in plans:
        assert set(new.groups.degree.tolist()) == {options(job).max_degree}
        assert rank_tokens(job.spec.execution, new).max(initial=0) <= memory_of(job)
        names = [c.name for c in new.candidates]
        assert len(set(names)) == len(names)
