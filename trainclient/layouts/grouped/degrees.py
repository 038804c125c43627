"""FlexSP's layout: ranks of the backbone share sequences in groups of unequal degree; states are shared by all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil
from typing import Final

import numpy as np

from dataserver.planning.job.fields import PLAN_LIMITS
from dataserver.planning.layouts.grouped.compositions import MAX_COMPOSITIONS, check_compositions
from trainclient.layouts.shared.beside_backbone import beside, module_choices, shared, side_options
from trainclient.orchestrate.choice import (
    BEST_CHOICES,
    Choice,
    LayoutDegrees,
    ModuleChoice,
    NoLayoutError,
    Problem,
    TooLargeError,
    insert,
)
from trainclient.orchestrate.costs import Option, gathering_ns, shard_bytes
from trainclient.orchestrate.sharing import Side, Spine, parts, step_ns

FINER: Final = (1, 2, 4, 8, 16)
"""Times as many waves as memory asks for that are tried."""
MAX_DEGREE: Final = 64
"""Ranks of the largest group that is tried."""


@dataclass(frozen=True, slots=True)
class Groups:
    """A choice for the backbone."""

    option: Option
    ranks: int
    smallest: int
    largest: int
    finer: int
    """Times as many waves as memory asks for."""
    whole: bool
    """Whether ranks keep whole weights and gradients (zero2)."""
    spine: Spine
    states: float
    work: float
    computing_ns: float
    waiting_ns: float


def grouped(problem: Problem) -> list[Choice]:
    """The best numbers of ranks and degrees of groups, and with them the best encoder and generator.

    Raises:
        NoLayoutError: servers do not plan such a job.
        TooLargeError: nothing fits.
    """
    most = PLAN_LIMITS[max(PLAN_LIMITS)].group_sequences
    if problem.workload.stream.global_batch > most:
        raise NoLayoutError(
            f"grouped: servers plan groups of at most {most} sequences, global-batch is "
            f"{problem.workload.stream.global_batch}; lower it"
        )
    found: list[Choice] = []
    kinds = side_options(problem)
    bounded = sorted(_all(problem, len(kinds)), key=lambda g: (g.spine.least_ns, g.ranks, -g.largest))
    for groups in bounded:
        below = found[BEST_CHOICES - 1].step_ns if len(found) >= BEST_CHOICES else float("inf")
        if groups.spine.least_ns >= below:
            break
        planned = _planned(problem, groups, len(kinds))
        if planned is None or planned.spine.least_ns >= below:
            continue
        sides = beside(problem, planned.spine, kinds)
        best = shared(planned.spine, sides, problem.cluster.gpus - planned.ranks, below)
        if best is not None:
            found = insert(found, _choice(problem, planned, best[1], best[2]))
    if not found:
        raise TooLargeError("grouped")
    return found


def _planned(problem: Problem, groups: Groups, sides: int) -> Groups | None:
    """The same with the smallest groups that servers plan; None if they plan none."""
    smallest = smallest_degree(groups.ranks, groups.largest)
    if smallest is None or smallest == 1:
        return None if smallest is None else groups
    return _groups(problem, groups.option, groups.ranks, (smallest, groups.largest), groups.finer, groups.whole, sides)


def _choice(problem: Problem, groups: Groups, sides: Sequence[Side], ranks: Sequence[int]) -> Choice:
    spine, option = groups.spine, groups.option
    room = problem.cluster.memory_bytes - groups.states - groups.work
    held = min(room, spine.sequences * option.sequence_bytes / groups.ranks)
    backbone_choice = ModuleChoice(
        option, groups.ranks, 1, groups.states + groups.work + held, groups.states, groups.work,
        groups.computing_ns, groups.waiting_ns,
    )  # fmt: skip
    modules = module_choices(problem, spine, sides, ranks, backbone_choice)
    degrees = [1 << p for p in range(1, groups.largest.bit_length()) if 1 << p >= groups.smallest]
    return Choice(
        "grouped", modules, sum(m.gpus for m in modules), 1, spine.waves, step_ns(spine, sides, ranks),
        parts(spine, sides, ranks), "zero2" if groups.whole else "zero3",
        kind="grouped",
        extras={
            "min_degree": groups.smallest, "max_degree": groups.largest, "heads": option.network.size.groups,
            "exchange": [{"degree": d, "unit_ps": round(exchange_ps(problem, option, d))} for d in degrees],
        },
    )  # fmt: skip


def _all(problem: Problem, sides: int) -> Iterator[Groups]:
    cluster = problem.cluster
    network = problem.network("backbone")
    for option in problem.options(network) if network else []:
        if option.tp > 1:
            continue
        for ranks in _numbers_of_ranks(cluster.gpus - sides, cluster.gpus_per_node):
            largest = 1
            while largest <= min(MAX_DEGREE, ranks) and option.network.divides_heads(largest) and ranks % largest == 0:
                tried = product(FINER, (False, True))
                made = (_groups(problem, option, ranks, (1, largest), *how, sides) for how in tried)
                yield from (groups for groups in made if groups is not None)
                largest *= 2


def _numbers_of_ranks(most: int, per_node: int) -> list[int]:
    """Powers of two within a node, and whole nodes; beyond 31 of them those with five binary digits."""
    within = [1 << p for p in range(per_node.bit_length()) if 1 << p < per_node]
    nodes = sorted({n >> p << p for n in range(1, most // per_node + 1) for p in [max(0, n.bit_length() - 5)]})
    return [n for n in (*within, *(per_node * n for n in nodes)) if n <= most]


@lru_cache(maxsize=4096)
def smallest_degree(ranks: int, largest: int) -> int | None:
    """The smallest groups with which servers plan so many ranks; None if they do not."""
    degree = 1
    while degree <= largest:
        cells, columns = ranks // degree, largest.bit_length() - degree.bit_length() + 1
        if cells ** (columns - 1) > MAX_COMPOSITIONS * 2 ** (columns * columns):  # far too many to count
            degree *= 2
            continue
        try:
            check_compositions(ranks, degree, largest)
        except ValueError:
            degree *= 2
        else:
            return degree
    return None


def _groups(
    problem: Problem, option: Option, ranks: int, degrees: tuple[int, int], finer: int, whole: bool, sides: int
) -> Groups | None:
    cluster, stream = problem.cluster, problem.workload.stream
    smallest, largest = degrees
    after = 1 if problem.network("generator") else 0
    states = shard_bytes(option, ranks, whole)
    tokens = int((cluster.memory_bytes - states) / (option.unit_bytes * (1 + after) + option.work_bytes))
    if tokens * largest < stream.seq_len:
        return None
    work = tokens * option.work_bytes
    share, lengths, squares = problem.workload.lengths
    mean = float(share @ lengths)
    waves = finer * max(1, ceil(stream.global_batch * mean / (ranks * tokens)))
    needed = _power(ranks * waves / stream.global_batch)
    if needed > largest:
        return None  # fewer sequences than groups
    both = (100 + option.cost.backward_percent) / 100
    exchanged = 1.0 if option.network.gradient_passes else 0.5  # forward alone
    times = both * (option.cost.linear_ps * lengths / 1e3 + option.cost.quadratic_fs * squares / 1e6)
    own = np.ceil(np.log2(np.maximum(max(smallest, needed), np.ceil(lengths / tokens - 1e-9)))).astype(np.int64)
    token_ps = np.array([exchange_ps(problem, option, 1 << p) for p in range(largest.bit_length())])
    times += exchanged * token_ps[own] * lengths / 1e3
    total, longest = stream.global_batch * float(share @ times), float(times.max()) / largest
    computing = option.fixed_ns + max(total / (ranks * waves), longest)
    waiting = 0.0 if whole else gathering_ns(option, ranks, cluster)
    stage = computing + waiting
    sequences = stream.global_batch / waves
    transfer = 4 * option.network.size.width * sequences * mean / ranks
    alone = stage + sides * transfer / cluster.between_bytes_ns
    sync = option.sync_ns(ranks, 1, cluster) if whole else 0.0
    spine = Spine(ranks, waves, sequences, stage, alone, sync, min(waves, 2 + after))
    return Groups(option, ranks, smallest, largest, finer, whole, spine, states, work, computing, waiting)


def exchange_ps(problem: Problem, option: Option, degree: int) -> float:
    """Picoseconds of the all-to-alls of a group for each token of a rank: queries, keys, values, outputs, and back."""
    if degree == 1:
        return 0.0
    size = option.network.size
    passes = 3 if option.recompute else 2
    sent = 2 * 2 * (size.width + size.width // size.heads * size.groups) * size.layers * passes
    return 1000 * sent * (degree - 1) / degree / problem.cluster.bandwidth(degree)


def _power(number: float) -> int:
    """The smallest power of two that is at least this, and 1."""
    return 1 << max(0, ceil(number - 1e-9) - 1).bit_length()


DEGREES = LayoutDegrees(has_backbone=True, best=grouped)
