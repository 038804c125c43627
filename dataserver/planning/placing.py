"""Where each sequence goes in the backbone: rank, microbatch, slot.

A placement is judged by islands: with g the greatest common divisor of the modules' data-parallel degrees, the ranks
fall into g islands, each with its share of the encoder, backbone and generator ranks, which exchange nothing with each
other (as with the communication brokers of DistTrain, section 4.2). One island is a small pipeline that can be
simulated in microseconds.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np

from dataserver.planning.arranging import TASK_OF
from dataserver.planning.balancing import in_runs, longest_first
from dataserver.planning.costs import forward_ns
from dataserver.planning.jobspec import BalancePolicy, Execution, ModuleKind, ModuleSpec
from dataserver.planning.ordering import disttrain_order
from dataserver.planning.packing import number_by_first
from dataserver.planning.randomness import Operator, draws
from dataserver.planning.samples import I64, U64, StepSamples

SEARCH_OPERATIONS = 5_000
"""Operations that a search may simulate for each sequence and pipeline stage: in all about 10 us for each of them, so
that planning time grows with the step and no faster."""

_KINDS = (ModuleKind.ENCODER, ModuleKind.BACKBONE, ModuleKind.GENERATOR)


@dataclass(frozen=True, slots=True)
class Placement:
    """Rank, microbatch and slot of each sequence, int64 [s] each."""

    rank: I64
    wave: I64
    slot: I64


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """What the placement of s sequences depends on."""

    dp: int
    """Backbone ranks."""
    num_waves: int
    """Microbatches of each rank."""
    slots: int
    """Sequences of each microbatch."""
    islands: int
    num_stages: int
    """Pipeline stages of the backbone."""
    in_flight: I64
    """int64 [stages + 2]: microbatches that encoder, backbone stages and generator hold at most, never rising; those of
    an absent module mean nothing."""
    present: tuple[bool, bool]
    """Whether the job has an encoder, a generator."""
    own: I64
    """int64 [3, s + 1]: forward nanoseconds of each sequence in its island's encoder, in each backbone stage, and in
    its island's generator; the last column is an empty slot."""
    base: I64
    """int64 [3]: forward nanoseconds of a microbatch beside its sequences."""
    percent: I64
    """int64 [3]: backward time in percent of the forward time."""

    @property
    def ranks_per_island(self) -> int:
        """Backbone ranks of one island."""
        return self.dp // self.islands

    @property
    def num_sequences(self) -> int:
        """Sequences to place."""
        return int(self.own.shape[1]) - 1


def placement_problem(
    execution: Execution, in_flight: I64, samples: StepSamples, sequence: I64, num_sequences: int, num_waves: int
) -> PlacementProblem:
    """The problem of one step, `sequence` int64 [n] being the sequence of each sample."""
    modules = [next(iter(execution.of_kind(kind)), None) for kind in _KINDS]
    islands = gcd(*(m.dp for m in modules if m is not None))
    own, base = np.zeros((3, num_sequences + 1), np.int64), np.zeros(3, np.int64)
    percent = np.zeros(3, np.int64)
    for row, module in enumerate(modules):
        if module is None:
            continue
        divisor = module.pp if module.kind is ModuleKind.BACKBONE else module.dp // islands
        item_sequence, sizes = _items(module, samples, sequence)
        np.add.at(own[row], item_sequence, forward_ns(module.cost, sizes))
        own[row] //= divisor
        base[row] = module.cost.microbatch_ns // (module.pp if module.kind is ModuleKind.BACKBONE else 1)
        percent[row] = module.cost.backward_percent
    return PlacementProblem(
        dp=execution.backbone.dp,
        num_waves=num_waves,
        slots=execution.microbatch,
        islands=islands,
        num_stages=execution.backbone.pp,
        in_flight=in_flight,
        present=(modules[0] is not None, modules[2] is not None),
        own=own,
        base=base,
        percent=percent,
    )


def _items(module: ModuleSpec, samples: StepSamples, sequence: I64) -> tuple[I64, I64]:
    """Sequence and size of each item that a module handles."""
    if module.kind is ModuleKind.BACKBONE:
        return sequence, samples.tokens
    images = np.flatnonzero(samples.task[samples.image_sample] == TASK_OF[module.kind])
    return sequence[samples.image_sample[images]], samples.patches[images]


def balanced(problem: PlacementProblem, policy: BalancePolicy) -> Placement:
    """Spread by backbone time: over ranks, then over the microbatches of each rank. Ranks hold equal counts.

    The microbatches of a rank stand in the canonical order of their first sequences: balancing leaves them sorted by
    load, which is a bad order for a pipeline.
    """
    loads = problem.own[1, :-1]
    if policy is BalancePolicy.NONE:
        return _placement(problem, in_runs(len(loads), problem.dp), loads, policy)
    rank = longest_first(loads, problem.dp, problem.num_waves * problem.slots)
    return _placement(problem, rank, loads, policy)


def stratified(problem: PlacementProblem) -> Placement:
    """Deal out sequences by encoder and generator time, back and forth: every rank gets large and small ones."""
    loads = problem.own[0, :-1] + problem.own[2, :-1]
    order = np.argsort(-loads, kind="stable")
    place = np.arange(len(order)) % (2 * problem.dp)
    rank = np.empty_like(order)
    rank[order] = np.minimum(place, 2 * problem.dp - 1 - place)
    return _placement(problem, rank, loads, BalancePolicy.LPT)


def _placement(problem: PlacementProblem, rank: I64, loads: I64, policy: BalancePolicy) -> Placement:
    wave, slot = np.zeros_like(rank), np.zeros_like(rank)
    for r in range(problem.dp):
        mine = np.flatnonzero(rank == r)
        if policy is BalancePolicy.NONE:
            wave[mine] = in_runs(len(mine), problem.num_waves)
        else:
            wave[mine] = number_by_first(longest_first(loads[mine], problem.num_waves, problem.slots))
        for w in range(problem.num_waves):
            here = mine[wave[mine] == w]
            slot[here] = np.arange(len(here))
    return Placement(rank, wave, slot)


def in_disttrain_order(problem: PlacementProblem, placement: Placement) -> Placement:
    """The same microbatches, each rank's ordered by DistTrain's Algorithm 2."""
    times = np.zeros((3, problem.dp, problem.num_waves), np.int64)
    for row in range(3):
        np.add.at(times[row], (placement.rank, placement.wave), problem.own[row, :-1])
    times[[0, 2]] *= problem.ranks_per_island  # a rank's own images, as if all ranks of the island were like it
    times += problem.base[:, None, None]
    rows = [0] * problem.present[0] + [1] * problem.num_stages + [2] * problem.present[1]
    wave = np.empty_like(placement.wave)
    for r in range(problem.dp):
        forward = [times[row, r] for row in rows]
        backward = [times[row, r] * problem.percent[row] // 100 for row in rows]
        position = np.empty(problem.num_waves, np.int64)
        position[disttrain_order(forward, backward)] = np.arange(problem.num_waves)
        mine = placement.rank == r
        wave[mine] = position[placement.wave[mine]]
    return Placement(placement.rank, wave, placement.slot)


def searched(problem: PlacementProblem, starts: list[Placement], step: int, seed: int) -> Placement:
    """Improve the best of some placements by bounded hill climbing on the slowest island.

    Assignment, composition and order change together (`kernels.pipeline.improve_placement`).
    """
    present = sum(problem.present)
    in_island = 2 * (problem.num_stages * problem.ranks_per_island + present)
    rounds = problem.num_waves + problem.num_stages + present
    allowed = SEARCH_OPERATIONS * problem.num_sequences * (problem.num_stages + present)
    budget = allowed // (in_island * rounds)
    best = _slots(problem, min(starts, key=lambda start: makespan_ns(problem, start)))
    _improve(problem, best, draws(seed, Operator.PLAN_SEARCH, 0, 0, step, 2 * budget), budget)
    rank, wave, slot = np.nonzero(best >= 0)
    found = Placement(*(np.empty(problem.num_sequences, np.int64) for _ in range(3)))
    placed = best[rank, wave, slot]
    found.rank[placed], found.wave[placed], found.slot[placed] = rank, wave, slot
    return found


def makespan_ns(problem: PlacementProblem, placement: Placement) -> int:
    """Simulated time of the slowest island."""
    return _improve(problem, _slots(problem, placement), np.zeros(0, np.uint64), 0)


def lower_bound_ns(problem: PlacementProblem) -> int:
    """A time that no placement can beat.

    Some rank of each stage has at least the mean work of the stage, and between its first forward and its last backward
    nothing else; before the one and after the other a sequence passes through all earlier stages.
    """
    both = 100 + problem.percent
    own = problem.own[:, :-1] * both[:, None] // 100
    base = problem.base * both // 100
    share = (1, problem.ranks_per_island, 1)
    rows = [0] * problem.present[0] + [1] * problem.num_stages + [2] * problem.present[1]
    full = problem.num_sequences == problem.dp * problem.num_waves * problem.slots
    smallest = own if full and problem.num_sequences else np.zeros((3, 1), np.int64)
    before = np.zeros(smallest.shape[1], np.int64)
    bound = 0
    for row in rows:
        share_of_one = int(own[row].sum()) // (problem.islands * share[row]) + int(base[row]) * problem.num_waves
        bound = max(bound, share_of_one + int(before.min()))
        before = before + smallest[row] + base[row]
    return bound


def _improve(problem: PlacementProblem, slots: I64, words: U64, budget: int) -> int:
    """Improve `slots` in place with at most `budget` simulated islands; the makespan that it had."""
    from dataserver.planning.kernels.pipeline import improve_placement

    before, _ = improve_placement(
        slots,
        problem.own,
        problem.base,
        problem.percent,
        np.array(problem.present),
        problem.ranks_per_island,
        problem.in_flight,
        words,
        budget,
    )
    return before


def _slots(problem: PlacementProblem, placement: Placement) -> I64:
    """int64 [ranks, microbatches, slots]: the sequence in each slot, -1 for none."""
    slots = np.full((problem.dp, problem.num_waves, problem.slots), -1, np.int64)
    slots[placement.rank, placement.wave, placement.slot] = np.arange(problem.num_sequences)
    return slots
