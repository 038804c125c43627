"""Rule-based placements, from which the search starts."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.balancing import in_runs, longest_first, longest_first_of_each
from dataserver.planning.balancing import padded as padded_batches
from dataserver.planning.job.fields import BalancePolicy
from dataserver.planning.layouts.pipelined.placing.problem import PlacementProblem
from dataserver.planning.plan.placement import Placement, in_order
from dataserver.planning.simulation import disttrain_orders
from dataserver.planning.stream.packing import number_by_first_of_each


def balanced(problem: PlacementProblem, policy: BalancePolicy) -> Placement:
    """Spread by backbone time, or that of all that a rank runs: over ranks, then over the microbatches of each rank.

    Ranks hold equal counts. The microbatches of a rank are in the canonical order of their first sequences: balancing
    leaves them sorted by load, which is a bad order for a pipeline.
    """
    yield_point()
    loads = problem.balanced_by
    if policy is BalancePolicy.NONE:
        rank = in_runs(len(loads), problem.dp)
        wave = np.concatenate([in_runs(count, problem.num_waves) for count in np.bincount(rank, minlength=problem.dp)])
        return in_order(rank, wave, problem.num_waves)
    return _placement(problem, longest_first(loads, problem.dp, problem.num_waves * problem.slots), loads)


def stratified(problem: PlacementProblem) -> Placement:
    """Deal out sequences by encoder and generator time, back and forth: every rank gets large and small ones.

    The smallest microbatch of each rank goes last and the next first, where the other stages wait for it.
    """
    others = np.arange(len(problem.base)) != problem.num_encoders
    loads = problem.work[others].sum(axis=0)
    order = np.argsort(-loads, kind="stable")
    place = np.arange(len(order)) % (2 * problem.dp)
    rank = np.empty_like(order)
    rank[order] = np.minimum(place, 2 * problem.dp - 1 - place)
    return with_small_ends(problem, _placement(problem, rank, loads))


def with_small_ends(problem: PlacementProblem, placement: Placement) -> Placement:
    """The same microbatches; of each rank the one that passes the pipeline fastest goes last, the next goes first."""
    times = microbatch_sums(problem, problem.own, placement)
    through = times.sum(axis=0) + (problem.num_stages - 1) * times[problem.num_encoders]
    small, rank = np.argsort(through, axis=1, kind="stable"), np.arange(problem.dp)
    key = np.tile(np.arange(problem.num_waves), (problem.dp, 1))
    key[rank, small[:, 1 % problem.num_waves]] = -1
    key[rank, small[:, 0]] = problem.num_waves
    wave = np.argsort(np.argsort(key, axis=1), axis=1)
    return Placement(placement.rank, wave[placement.rank, placement.wave], placement.slot)


def spread_over_waves(problem: PlacementProblem) -> Placement:
    """Place as few sequences as can be in every wave, dealt out to components and their ranks in turn: needs least
    memory.

    With w waves for s sequences no two are closer than w // s waves, so that none are in flight together if there are
    enough.
    """
    number = np.arange(problem.num_sequences)
    within = number // problem.components % problem.ranks_per_component
    rank = number % problem.components * problem.ranks_per_component + within
    wave = number * problem.num_waves // max(1, problem.num_sequences)
    return in_order(rank, wave, problem.num_waves)


def _equal_runs(largest: I64, count: int, _slots: int) -> I64:
    """Runs of equal count, longest sequences first: they pad least. int64 [s]."""
    order = np.argsort(-largest, kind="stable")
    equal = np.empty(len(order), np.int64)
    equal[order] = in_runs(len(order), count)
    return equal


PADDED_RUNS: Mapping[str, Callable[[I64, int, int], I64]] = MappingProxyType(
    {"runs of equal length": _equal_runs, "even padded runs": padded_batches}
)
"""How sequences sorted by length are cut into microbatches: from times int64 [s], number and slots of these the
microbatch of each."""


def padded_runs(problem: PlacementProblem, cut: Callable[[I64, int, int], I64]) -> Placement:
    """Place, for a padded backbone, sequences cut into microbatches by length, which are spread longest first."""
    count = problem.dp * problem.num_waves
    batch = cut(problem.own[problem.num_encoders, :-1], count, problem.slots)
    times, items = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.maximum.at(times, batch, problem.own[problem.num_encoders, :-1])
    np.add.at(items, batch, 1 if problem.items is None else problem.items[:-1])
    rank_of = longest_first(times * items, problem.dp, problem.num_waves)
    order = np.argsort(rank_of, kind="stable")
    wave_of = np.empty(count, np.int64)
    wave_of[order] = np.arange(count) % problem.num_waves
    rank = rank_of[batch]
    yield_point()
    wave = number_by_first_of_each(wave_of[batch], rank, problem.dp, problem.num_waves)
    return in_order(rank, wave, problem.num_waves)


def _placement(problem: PlacementProblem, rank: I64, loads: I64) -> Placement:
    """The sequences of each rank over its microbatches, balanced by `loads`."""
    yield_point()
    wave = longest_first_of_each(loads, rank, problem.dp, problem.num_waves, problem.slots)
    yield_point()
    wave = number_by_first_of_each(wave, rank, problem.dp, problem.num_waves)
    yield_point()
    return in_order(rank, wave, problem.num_waves)


def microbatch_sums(problem: PlacementProblem, values: I64, placement: Placement) -> I64:
    """Values of sequences, int64 [rows, s + 1], summed over microbatches; of a padded backbone items x the largest.

    Returns:
        int64 [rows, ranks, waves].
    """
    place = placement.rank, placement.wave
    sums = np.zeros((len(values), problem.dp, problem.num_waves), np.int64)
    for row in range(len(values)):
        if problem.items is None or row != problem.num_encoders:
            np.add.at(sums[row], place, values[row, :-1])
    if problem.items is not None:
        items = np.zeros_like(sums[0])
        np.add.at(items, place, problem.items[:-1])
        np.maximum.at(sums[problem.num_encoders], place, values[problem.num_encoders, :-1])
        sums[problem.num_encoders] *= items
    return sums


def in_disttrain_order(problem: PlacementProblem, placement: Placement) -> Placement:
    """The same microbatches, each rank's ordered by DistTrain's Algorithm 2; encoders side by side count as one."""
    yield_point()
    times, backbone = microbatch_sums(problem, problem.own, placement), problem.num_encoders
    images = np.arange(len(times)) != backbone
    times[images] *= problem.ranks_per_component  # a rank's own images, as if all ranks of the component were like it
    times += problem.base[:, None, None]
    both = np.stack([times, times * problem.percent[:, None, None] // 100])
    stages = [both[:, backbone]] * problem.num_stages
    if problem.whole:
        stages[0] = both[:, : backbone + 1].sum(axis=1)
    elif backbone:
        stages.insert(0, both[:, :backbone].max(axis=1))
    if backbone + 1 < len(times):
        stages.append(both[:, backbone + 1 :].max(axis=1))
    forward, backward = np.stack(stages, axis=2)
    position = np.argsort(disttrain_orders(forward, backward), axis=1)
    return Placement(placement.rank, position[placement.rank, placement.wave], placement.slot)
