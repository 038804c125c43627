"""What the search for sequence-parallel groups finds on small clusters, pinned part by part."""

from collections.abc import Iterator

import numpy as np
import pytest
from planning.scattered import digest, numbers

from dataserver.planning import I64
from dataserver.planning.layouts.grouped.batch import UNLIMITED, Batch
from dataserver.planning.layouts.grouped.costs import GroupCosts
from dataserver.planning.layouts.grouped.homogeneous import (
    best_homogeneous_plan,
    homogeneous_plan,
    searched_homogeneous_plan,
)
from dataserver.planning.layouts.grouped.policies import bounded_budget, compositions_text, halved
from dataserver.planning.layouts.grouped.search import Budget, chunk_bounds
from dataserver.planning.layouts.grouped.sequence_plan import SequenceGroup, SequencePlan, plan_groups

BUDGETS = (
    Budget(),
    Budget(microbatch_counts=1, moves=0, cuts=0, rounds=1, transfers=0),
    Budget(2, 2, 1, 1, 3),
    Budget(3, 1, 5, 2, 1),
)


def problems(count: int) -> Iterator[tuple[int, I64, GroupCosts, I64 | None]]:
    """Clusters of 1 to 16 devices, some of whose larger groups exchange faster than smaller ones, and a batch each."""
    for seed in range(count):
        devices, least = ((1, 1), (2, 1), (4, 2), (6, 1), (8, 1), (12, 2), (16, 1))[seed % 7]
        degrees = tuple(1 << p for p in range(least.bit_length() - 1, devices.bit_length()))
        token_ps = tuple(numbers(seed, len(degrees), 300_000, 1_200_000).tolist())
        costs = GroupCosts("toy", devices, degrees, 100, 20_000_000 * (seed % 3), token_ps, 500 * (seed % 4))
        lengths = numbers(seed + 1, seed % 23, 1, 70)
        lengths[: seed % 4] *= degrees[-1]
        yield seed, lengths, costs, None if seed % 5 else lengths * lengths * 2 // 3 + 1


def spelled(plan: SequencePlan) -> list[object]:
    microbatches = [[(g.first_rank, g.degree, g.sequences, g.time_ns) for g in m.groups] for m in plan.microbatches]
    return [plan.time_ns, plan.bound_ns, [m.time_ns for m in plan.microbatches], microbatches]


def test_golden_plans_of_every_budget() -> None:
    found = [
        spelled(plan_groups(lengths, costs, squares=squares, budget=BUDGETS[seed // 3 % 4]))
        for seed, lengths, costs, squares in problems(84)
    ]
    assert digest(found) == "fe1c42762cfb5181"


def test_golden_groupings() -> None:
    """Of one microbatch, under limits just above and at what is found without; and what idle groups take."""
    found: list[object] = []
    for seed, lengths, costs, squares in problems(63):
        order = np.argsort(-lengths, kind="stable")
        batch = Batch(lengths[order], costs, None, None if squares is None else squares[order])
        members = np.arange(len(lengths))[seed % 2 :: 1 + seed % 3]
        free = batch.group(members, UNLIMITED, seed % 4)
        if free is None:
            found.append(None)
            continue
        found.append((free.time_ns, free.group.tolist(), free.composition.tolist()))
        for limit in (free.time_ns + 1, free.time_ns, free.time_ns - 1):
            again = batch.group(members, limit, seed % 4)
            assert again is None or again.time_ns < limit
            found.append(None if again is None else (again.time_ns, again.group.tolist()))
        others = np.setdiff1d(np.arange(len(lengths)), members)
        giver = batch.group(others, UNLIMITED, 8)
        if giver is not None:
            found.append((batch.takes(free, giver).tolist(), batch.takes(giver, free).tolist()))
        found.append([batch.bound(a, b) for a in range(len(lengths)) for b in range(a, len(lengths) + 1)])
    assert digest(found) == "3d676de83d949c31"


def test_golden_chunks() -> None:
    found = [chunk_bounds(numbers(n, n, 1, 40), k).tolist() for n in range(1, 14) for k in range(1, n + 1)]
    assert digest(found) == "869cd81996cbe4f8"


def test_golden_homogeneous_plans() -> None:
    """Of every degree; from degree 16 on groups share the last microbatch."""
    found: list[object] = []
    for seed, lengths, costs, squares in problems(49):
        if costs.num_devices & (costs.num_devices - 1):
            continue
        for degree in costs.degrees:
            here = np.minimum(lengths, degree * costs.device_tokens)
            found.append(spelled(homogeneous_plan(here, costs, degree, squares=squares)))
        found.append(spelled(homogeneous_plan(lengths, costs, squares=squares)))
        found.append(spelled(best_homogeneous_plan(lengths, costs, squares=squares)))
        found.append(spelled(searched_homogeneous_plan(lengths, costs, BUDGETS[seed % 4], squares)))
    wide = GroupCosts("wide", 128, (8, 16, 32), 10, 100, (5_000, 6_000, 7_000), 10)
    for seed in range(12):
        lengths = np.sort(numbers(seed, 9 + 3 * seed, 1, 79 + seed))
        found += [spelled(homogeneous_plan(lengths, wide, degree)) for degree in (16, 32)]
    assert digest(found) == "f89cd3775637872c"


def test_what_homogeneous_plans_refuse() -> None:
    costs = GroupCosts("toy", 12, (1, 2, 4, 8), 100, 10, (1, 2, 3, 4), 0)
    one = np.array([100])
    for degree in (1, 2, 4):
        homogeneous_plan(one, costs, degree)
    for degree in (3, 8, 16):
        with pytest.raises(ValueError, match=f"groups of {degree} on 12 devices: the degree must be one of "):
            homogeneous_plan(one, costs, degree)
    message = "sequence 2 has 401 tokens and does not fit a group of 2 devices, which holds 200: use degree 8"
    with pytest.raises(ValueError, match=message):
        homogeneous_plan(np.array([200, 1, 401, 300]), costs, 2)
    for find in (best_homogeneous_plan, searched_homogeneous_plan):
        assert {g.degree for m in find(np.array([400]), costs).microbatches for g in m.groups} == {4}
        message = r"none of the degrees \(8,\) that hold a sequence of 401 tokens divides 12 devices"
        with pytest.raises(ValueError, match=message):
            find(np.array([1, 401]), costs)


def test_times_up_to_what_int64_counts() -> None:
    """One step above each of the three limits is refused: sums of times x devices, exchanges, attention."""

    def batch(count: int, devices: int, degree: int, fs: int, ps: int, square: int = 0) -> Batch:
        costs = GroupCosts("toy", devices, (degree,), 1 << 22, fs, (ps,), 0)
        return Batch(np.ones(count, np.int64), costs, None, np.full(count, square))

    most = 1_000 << 50  # ps x 1,024 are 2^60 ns
    for fits, more in (
        ((1, 1_024, 1, 0, most - 1), (1, 1_024, 1, 0, most)),
        ((2, 512, 1, 0, most - 1), (2, 512, 1, 0, most)),
        ((1, 2_048, 2, 0, most - 1), (1, 2_048, 2, 0, most)),
        ((1, 1_024, 1, most - 1_000, 999, 1_000), (1, 1_024, 1, most - 1_000, 1_000, 1_000)),
        ((1, 1_024, 1, most, 0, 999), (1, 1_024, 1, most // 2, 0, 2_000)),
        ((4, 1, 1, 0, (1 << 60) - 1), (4, 1, 1, 0, 1 << 60)),
        ((1, 1, 1, (1 << 60) - 1, 0, 4_999), (1, 1, 1, 1 << 60, 0, 4_000)),
    ):
        batch(*fits)
        with pytest.raises(ValueError, match=rf"toy: {more[0]} sequences with up to 1 tokens take longer than int64"):
            batch(*more)


def test_golden_budgets() -> None:
    """What is given up, and from how many microbatches on."""
    found = []
    for devices, least in ((64, 1), (64, 2), (128, 1), (8, 1)):
        degrees = tuple(1 << p for p in range(least.bit_length() - 1, devices.bit_length()))
        costs = GroupCosts("toy", devices, degrees, 100, 1, (1,) * len(degrees), 0)
        for fewest in (1, 2, 3, 4, 6, 9, 13, 20, 40, 90, 150, 300, 700, 2_000, 5_000):
            budget = bounded_budget(fewest * costs.cluster_tokens, costs)
            assert budget == bounded_budget((fewest - 1) * costs.cluster_tokens + 1, costs)
            found.append((budget.microbatch_counts, budget.moves, budget.cuts, budget.rounds, budget.transfers))
    assert found[0] == (5, 64, 24, 3, 8)
    assert digest(found) == "7a80a337801b690d"


def test_halves_take_turns_over_all_groups() -> None:
    groups = [SequenceGroup(0, 4, (7, 8, 9), 5), SequenceGroup(4, 2, (), 6), SequenceGroup(6, 2, (3, 4), 7)]
    assert halved(groups) == (
        [SequenceGroup(0, 4, (7, 9), 0), SequenceGroup(4, 2, (), 0), SequenceGroup(6, 2, (4,), 0)],
        [SequenceGroup(0, 4, (8,), 0), SequenceGroup(4, 2, (), 0), SequenceGroup(6, 2, (3,), 0)],
    )


def test_compositions_as_the_paper_writes_them() -> None:
    assert compositions_text([[32, 8, 8, 8, 8], [1] * 64, [1] * 64, [64]]) == "<32, 8 x 4>, 2 times <1 x 64>, <64>"
    assert compositions_text([]) == ""
