"""A plan is made again from the positions of its items, and nothing that is no plan of the step is taken for one."""

import tracemalloc
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest
from builders.jobs import LAYOUT_KINDS
from builders.matrix import matrix, samples_of

from dataserver.planning.job.identity import Job
from dataserver.planning.job.limits import most_microbatches
from dataserver.planning.plan.compact import CompactPlan, UnfitPlanError, compact, expand
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import plan_step

STEP = 3


@cache
def planned(kind: str, number: int) -> tuple[Job, StepPlan] | None:
    """A step of the matrix; None where it cannot be planned."""
    job, tables = matrix(kind, number)
    try:
        return job, plan_step(job, STEP, samples_of(job, tables))
    except ValueError:
        return None


def first(kind: str, wanted: Callable[[Job, StepPlan], bool]) -> tuple[Job, StepPlan]:
    """The first step of the matrix that is as wanted."""
    found = (planned(kind, number) for number in range(200))
    return next(f for f in found if f is not None and wanted(*f))


def assert_same(one: object, other: object) -> None:
    for field in fields(one):  # type: ignore[arg-type]
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, field.name
            assert np.array_equal(a, b), field.name
        elif isinstance(a, tuple):
            for x, y in zip(a, b, strict=True):
                assert_same(x, y)
        elif hasattr(a, "__dataclass_fields__"):
            assert_same(a, b)
        else:
            assert a == b, field.name


@pytest.mark.parametrize("kind", LAYOUT_KINDS)
def test_a_plan_is_made_again_from_its_compact_form(kind: str) -> None:
    found = [f for number in range(25) if (f := planned(kind, number)) is not None]
    assert len(found) > 12
    for job, plan in found:
        assert_same(expand(job, STEP, plan.samples, compact(job, plan)), plan)


def large(job: Job, plan: StepPlan) -> bool:
    """Whether there is something to break in a plan."""
    return len(plan.samples) > 8 and plan.num_microbatches > 1 and all(len(a.item) > 3 for a in plan.arrangements)


def with_positions(found: CompactPlan, module: int, **changes: np.ndarray) -> CompactPlan:
    positions = list(found.positions)
    positions[module] = replace(positions[module], **changes)
    return replace(found, positions=tuple(positions))


BROKEN: dict[str, tuple[Callable[[CompactPlan], CompactPlan], str]] = {
    "no microbatch": (lambda f: replace(f, num_microbatches=0), "it has 0 microbatches"),
    "many microbatches": (lambda f: replace(f, num_microbatches=1 << 30), "microbatches; 1 to"),
    "many slots": (lambda f: replace(f, sequences_per_microbatch=1 << 30), "sequence slots; 0 to"),
    "a module less": (lambda f: replace(f, positions=f.positions[1:]), "positions for"),
    "a stage less": (lambda f: replace(f, schedules=f.schedules[1:]), "its schedules are not those"),
    "nothing in flight": (
        lambda f: replace(f, schedules=tuple(replace(s, in_flight=s.in_flight * 0) for s in f.schedules)),
        "holds nothing in flight",
    ),
    "a strange chunk": (
        lambda f: replace(f, schedules=tuple(replace(s, chunks=77) for s in f.schedules)),
        "has 77 chunks",
    ),
    "an item less": (
        lambda f: with_positions(f, 0, rank=f.positions[0].rank[1:], microbatch=f.positions[0].microbatch[1:]),
        "it places",
    ),
    "uneven arrays": (lambda f: with_positions(f, 0, rank=f.positions[0].rank[1:]), "it places"),
    "a rank too many": (lambda f: with_positions(f, 0, rank=f.positions[0].rank + 1000), "ranks of module"),
    "a rank below": (lambda f: with_positions(f, 0, rank=f.positions[0].rank - 1000), "ranks of module"),
    "a late microbatch": (
        lambda f: with_positions(f, 0, microbatch=f.positions[0].microbatch + f.num_microbatches),
        "microbatches of module",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("kind", LAYOUT_KINDS)
def test_what_is_no_plan_of_the_step_is_refused(kind: str, case: str) -> None:
    job, plan = first(kind, large)
    change, message = BROKEN[case]
    with pytest.raises(UnfitPlanError, match=message):
        expand(job, STEP, plan.samples, change(compact(job, plan)))


def test_an_overlong_sequence_is_refused() -> None:
    job, plan = first("pipelined", lambda j, p: large(j, p) and int(p.samples.tokens.sum()) > j.stream.seq_len)
    found, module = compact(job, plan), [m.kind for m in job.spec.execution.modules].index("backbone")
    zeros = np.zeros_like(found.positions[module].rank)
    with pytest.raises(UnfitPlanError, match="tokens, and seq_len is"):
        expand(job, STEP, plan.samples, with_positions(found, module, rank=zeros, microbatch=zeros, slot=zeros))


def test_places_of_sequences_that_nothing_is_in_take_no_memory() -> None:
    """A peer may name as many microbatches and slots as any step has: it decides how much, and not what it takes."""
    job, plan = first("pipelined", large)
    found, module = compact(job, plan), [m.kind for m in job.spec.execution.modules].index("backbone")
    backbone, slots = job.spec.execution.backbone, len(plan.samples)
    number = np.arange(slots)
    last = most_microbatches(job.spec.execution) - 1 - number // backbone.dp
    broken = with_positions(found, module, rank=number % backbone.dp, microbatch=last, slot=np.full(slots, slots - 1))
    broken = replace(broken, num_microbatches=int(last[0]) + 1, sequences_per_microbatch=slots)
    tracemalloc.start()
    try:
        expand(job, STEP, plan.samples, broken)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 8 * backbone.dp * broken.num_microbatches * slots > 2 << 20
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"degree": 0}, "do not make up"),
        ({"first_rank": 1}, "do not make up|first ranks of"),
        ({"microbatch": 1}, "do not make up|microbatches of"),
    ],
)
def test_groups_that_do_not_make_up_the_ranks_are_refused(change: dict[str, int], message: str) -> None:
    job, plan = first("grouped", large)
    found = compact(job, plan)
    ((name, add),) = change.items()
    broken = getattr(found.groups, name) * (add != 0) + add
    with pytest.raises(UnfitPlanError, match=message):
        expand(job, STEP, plan.samples, replace(found, groups=replace(found.groups, **{name: broken})))


def test_groups_of_ranks_beyond_those_of_the_module_are_refused() -> None:
    """Even those that name the first rank of one microbatch as one more of the microbatch before."""
    job, plan = first("grouped", large)
    found = compact(job, plan)
    dp, then = job.spec.execution.module(found.groups.module).dp, (found.groups.microbatch == 1)
    broken = replace(
        found.groups, microbatch=found.groups.microbatch - then, first_rank=found.groups.first_rank + then * dp
    )
    with pytest.raises(UnfitPlanError, match=f"first ranks of groups of module {found.groups.module}"):
        expand(job, STEP, plan.samples, replace(found, groups=broken))


@pytest.mark.parametrize(
    ("each", "message"), [(1, "do not make up"), (None, "degrees of groups")], ids=["of one rank", "of all ranks"]
)
def test_a_group_of_ranks_in_two_microbatches_is_refused(each: int | None, message: str) -> None:
    job, plan = first("grouped", large)
    found = compact(job, plan)
    dp = job.spec.execution.module(found.groups.module).dp
    first_rank = np.arange(0, dp, each or dp)
    degree = np.full((found.num_microbatches, len(first_rank)), each or dp)
    microbatch = np.repeat(np.arange(found.num_microbatches), len(first_rank))
    degree[0, -1] += degree[1, 0]  # the last group of the first microbatch and the first one of the second
    rest = np.arange(degree.size) != len(first_rank)
    broken = replace(
        found.groups,
        microbatch=microbatch[rest],
        first_rank=np.tile(first_rank, found.num_microbatches)[rest],
        degree=degree.ravel()[rest],
    )
    with pytest.raises(UnfitPlanError, match=message):
        expand(job, STEP, plan.samples, replace(found, groups=broken))


def test_microbatches_of_groups_are_those_of_the_plan() -> None:
    """Also where a product with the number of ranks, in 64 bits, is that of one."""
    job, plan = first("grouped", large)
    found = compact(job, plan)
    assert job.spec.execution.module(found.groups.module).dp % 2 == 0
    broken = replace(found.groups, microbatch=found.groups.microbatch + np.iinfo(np.int64).min)
    with pytest.raises(UnfitPlanError, match="microbatches of groups"):
        expand(job, STEP, plan.samples, replace(found, groups=broken))


def test_items_beside_the_first_rank_of_their_group_are_refused() -> None:
    job, plan = first("grouped", lambda j, p: large(j, p) and bool((p.groups.degree > 1).all()))
    found, module = compact(job, plan), [m.kind for m in job.spec.execution.modules].index("backbone")
    beside = found.positions[module].rank + 1
    with pytest.raises(UnfitPlanError, match="not the first of a group"):
        expand(job, STEP, plan.samples, with_positions(found, module, rank=beside))


@pytest.mark.parametrize("kind", LAYOUT_KINDS)
def test_other_places_have_another_hash(kind: str) -> None:
    """Two items that change positions are a plan as well, but not this one."""
    job, plan = first(kind, lambda j, p: large(j, p) and j.spec.execution.modules[0].dp > 1)
    found = compact(job, plan)
    rank = found.positions[0].rank.copy()
    a, b = 0, int(np.flatnonzero(rank != rank[0])[0])
    rank[[a, b]] = rank[[b, a]]
    try:
        other = expand(job, STEP, plan.samples, with_positions(found, 0, rank=rank))
    except UnfitPlanError:  # in sequences, the exchange may be too long for one
        return
    assert other.hash != plan.hash
