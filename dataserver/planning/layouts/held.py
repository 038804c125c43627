"""What microbatches hold on a device, and how many of them fit at once."""

import numpy as np

from dataserver.planning.balancing import bin_totals
from dataserver.planning.jobspec import ModuleSpec
from dataserver.planning.plan import ArrangedStep
from dataserver.planning.samples import I64
from dataserver.planning.sequence_parallel.module import rank_tokens


def held_units(module: ModuleSpec, plan: ArrangedStep) -> I64:
    """Tokens or patches, padding included, of every microbatch on one device. int64 [dp, microbatches]."""
    if module.sequence_groups is not None:
        return rank_tokens(module, plan)
    arrangement = plan.arrangement(module.name)
    sizes = (plan.samples.tokens if module.holds_samples else plan.samples.patches)[arrangement.item]
    place = arrangement.rank * plan.num_microbatches + arrangement.microbatch
    held = bin_totals(sizes, place, module.dp * plan.num_microbatches, padded=module.padded)
    return held.reshape(module.dp, plan.num_microbatches)


def most_in_flight(units: I64, room: int, wanted: int) -> int:
    """Consecutive microbatches, at most `wanted` and at least 1, that no rank ever lacks the room for.

    Args:
        units: int64 [ranks, microbatches], as of `held_units`.
        room: units that a device holds.
        wanted: at least 1.
    """
    sums = np.concatenate([np.zeros((len(units), 1), np.int64), np.cumsum(units, axis=1)], axis=1)
    for number in range(min(wanted, units.shape[1]), 1, -1):
        if int((sums[:, number:] - sums[:, :-number]).max(initial=0)) <= room:
            return wanted if number == units.shape[1] else number
    return 1
