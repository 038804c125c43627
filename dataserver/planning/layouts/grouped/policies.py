"""The plans among which a job's policy lets a step choose, and what microbatches of them look like."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType

import numpy as np

from dataserver.planning import I64
from dataserver.planning.layouts.grouped.compositions import group_compositions
from dataserver.planning.layouts.grouped.costs import GroupCosts
from dataserver.planning.layouts.grouped.homogeneous import (
    best_homogeneous_plan,
    homogeneous_plan,
    searched_homogeneous_plan,
)
from dataserver.planning.layouts.grouped.options import GroupPolicy
from dataserver.planning.layouts.grouped.search import Budget
from dataserver.planning.layouts.grouped.sequence_plan import SequenceGroup, SequencePlan, plan_groups

Plans = Mapping[str, SequencePlan]
"""Plans by names that are shown to people."""

MAX_LOOKS = 15_000_000
"""Compositions that the search of a step may look at, placing and improving counted as so many more: two seconds."""

PLACING = 5_000
"""Compositions that could be looked at while one microbatch is placed and improved."""

QUICK = Budget(microbatch_counts=2, moves=16, cuts=4, rounds=1, transfers=2)
"""Budget of searches beside the policy's own: for groups of one degree, and for less memory."""

_SAVINGS: tuple[Mapping[str, int], ...] = (
    MappingProxyType({"rounds": 1}),
    MappingProxyType({"cuts": 8}),
    MappingProxyType({"microbatch_counts": 2}),
    MappingProxyType({"cuts": 2}),
    MappingProxyType({"microbatch_counts": 1, "cuts": 0}),
)
"""What a budget gives up, in this order."""


def plans_of(policy: GroupPolicy, lengths: I64, squares: I64, costs: GroupCosts) -> Plans:
    """The policy's own plan first, and plans of one degree to compare it with, by names for people.

    Each is compared with the published plan of the best degree (FlexSP-BatchAda: best fit) and with that of the largest
    degree. Policy `homogeneous` searches for one degree at length, `search` also does so quickly.

    Lengths and squares are those of `plan_groups`.

    Raises:
        ValueError: a sequence fits no group, costs are beyond int64.
    """
    return _plans_of(policy, lengths.tobytes(), squares.tobytes(), costs)


@lru_cache(maxsize=4)
def _plans_of(policy: GroupPolicy, packed_lengths: bytes, packed_squares: bytes, costs: GroupCosts) -> Plans:
    """`plans_of`, once for the ways to run a step that differ in other things than groups."""
    lengths, squares = np.frombuffer(packed_lengths, np.int64), np.frombuffer(packed_squares, np.int64)
    static = homogeneous_plan(lengths, costs, squares=squares)
    best_fit = best_homogeneous_plan(lengths, costs, squares=squares)
    compared = {_titled("static", static): static}
    if best_fit.microbatches != static.microbatches:
        compared = {_titled("one degree by best fit", best_fit): best_fit} | compared
    match policy:
        case GroupPolicy.STATIC:
            return {_titled("static", static): static}
        case GroupPolicy.HOMOGENEOUS:
            searched = searched_homogeneous_plan(lengths, costs, squares=squares)
            return {_titled("one degree by search", searched): searched} | compared
        case GroupPolicy.SEARCH:
            budget = bounded_budget(int(lengths.sum()), costs)
            quick = searched_homogeneous_plan(lengths, costs, QUICK, squares=squares)
            if quick.time_ns < best_fit.time_ns:
                compared = {_titled("one degree by quick search", quick): quick} | compared
            return {"unequal groups by search": plan_groups(lengths, costs, squares=squares, budget=budget)} | compared


def quick_plan(policy: GroupPolicy, lengths: I64, squares: I64, costs: GroupCosts) -> SequencePlan:
    """A plan like the policy's own first one, by a small search.

    Raises:
        ValueError: a sequence fits no group.
    """
    return _quick_plan(policy, lengths.tobytes(), squares.tobytes(), costs)


@lru_cache(maxsize=32)
def _quick_plan(policy: GroupPolicy, packed_lengths: bytes, packed_squares: bytes, costs: GroupCosts) -> SequencePlan:
    """`quick_plan`, once for the ways to run a step that differ in other things than groups."""
    lengths, squares = np.frombuffer(packed_lengths, np.int64), np.frombuffer(packed_squares, np.int64)
    match policy:
        case GroupPolicy.STATIC:
            return homogeneous_plan(lengths, costs, squares=squares)
        case GroupPolicy.HOMOGENEOUS:
            return searched_homogeneous_plan(lengths, costs, QUICK, squares=squares)
        case GroupPolicy.SEARCH:
            return plan_groups(lengths, costs, squares=squares, budget=QUICK)


def bounded_budget(tokens: int, costs: GroupCosts) -> Budget:
    """The default budget of a search, less where many microbatches meet many compositions.

    Every cut between two microbatches that is tried looks at all compositions, and places the sequences of two
    microbatches (`kernels.best_grouping`).
    """
    budget = Budget()
    for change in _SAVINGS:
        if _looks(budget, tokens, costs) <= MAX_LOOKS:
            break
        budget = replace(budget, **change)
    return budget


def is_quick(tokens: int, costs: GroupCosts) -> bool:
    """Whether `quick_plan` looks at no more compositions for so many tokens than the search of a step may."""
    return _looks(QUICK, tokens, costs) <= MAX_LOOKS


def _looks(budget: Budget, tokens: int, costs: GroupCosts) -> int:
    """Compositions that a search looks at, at most; `PLACING` more for each microbatch that it places."""
    fewest = -(-tokens // costs.cluster_tokens)
    looks = PLACING + len(group_compositions(costs.num_devices, costs.degrees[0], costs.degrees[-1]))
    cuts = budget.cuts * (budget.rounds if fewest > 2 else 1)
    return budget.microbatch_counts * fewest * (1 + 2 * cuts) * looks


def _titled(name: str, plan: SequencePlan) -> str:
    degrees = sorted({g.degree for m in plan.microbatches for g in m.groups})
    return f"{name}, groups of {degrees[0]}" if degrees else name


def idle_groups(costs: GroupCosts) -> tuple[SequenceGroup, ...]:
    """The largest groups with nothing to do: what a step without samples consists of."""
    degree = costs.degrees[-1]
    return tuple(SequenceGroup(rank, degree, (), 0) for rank in range(0, costs.num_devices, degree))


def halved(groups: Sequence[SequenceGroup]) -> tuple[list[SequenceGroup], list[SequenceGroup]]:
    """The same groups twice, with every other sequence in the second; both have some if there are two or more.

    The groups' times are left at 0.
    """
    halves: tuple[list[SequenceGroup], list[SequenceGroup]] = ([], [])
    count = 0
    for group in groups:
        for number, half in enumerate(halves):
            kept = tuple(s for n, s in enumerate(group.sequences, count) if n % 2 == number)
            half.append(SequenceGroup(group.first_rank, group.degree, kept, 0))
        count += len(group.sequences)
    return halves


def compositions_text(compositions: Iterable[Sequence[int]]) -> str:
    """Degrees of the groups of each microbatch, as the paper writes them: "<32, 8 x 4>, 3 times <1 x 64>"."""
    found = []
    for text, alike in groupby(f"<{', '.join(_counted(degrees))}>" for degrees in compositions):
        count = len(list(alike))
        found.append(text if count == 1 else f"{count} times {text}")
    return ", ".join(found)


def _counted(degrees: Sequence[int]) -> Iterator[str]:
    for degree, alike in groupby(degrees):
        count = len(list(alike))
        yield str(degree) if count == 1 else f"{degree} x {count}"
