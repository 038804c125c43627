"""Kernel that spreads the items of many waves over ranks."""

import numpy as np

from dataserver.planning import I64
from dataserver.planning.kernels.compiler import kernel


def first_to_finish(
    loads: I64, need: I64, order: I64, wave: I64, component: I64, num_components: int, width: int, budget: int
) -> tuple[I64, int]:
    """The rank of each item: in `order`, to the rank of its component that would finish it first, the lower on ties.

    Finish times run on from wave to wave. Ranks whose items of the wave would need more than `budget` are passed over.

    Args:
        loads: int64 [k].
        need: int64 [k], memory that each item takes until the end of its wave.
        order: int64 [k], wave by wave.
        wave: int64 [k].
        component: int64 [k].
        num_components: how many there are.
        width: ranks of a component.
        budget: memory of a rank.

    Returns:
        The rank of each item, and the first item for which there was no rank, or -1.
    """
    rank, (finish, used) = np.full_like(loads, -1), np.zeros((2, num_components * width), np.int64)
    return rank, _first_to_finish(loads, need, order, wave, component, width, budget, rank, finish, used)


@kernel
def _first_to_finish(
    loads: I64,
    need: I64,
    order: I64,
    wave: I64,
    component: I64,
    width: int,
    budget: int,
    rank: I64,
    finish: I64,
    used: I64,
) -> int:
    """Fill in `rank`. Of each rank: `finish`, the end of its work over all waves so far; `used`, memory in use in the
    current wave."""
    current = -1
    for item in order:
        if wave[item] != current:
            current = wave[item]
            used[:] = 0
        first, chosen = component[item] * width, -1
        for r in range(first, first + width):
            if used[r] + need[item] <= budget and (chosen < 0 or finish[r] < finish[chosen]):
                chosen = r
        if chosen < 0:
            return int(item)
        rank[item] = chosen
        finish[chosen] += loads[item]
        used[chosen] += need[item]
    return -1
