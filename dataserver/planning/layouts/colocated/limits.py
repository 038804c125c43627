"""What no round of a colocated step could hold."""

from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64, Bool
from dataserver.planning.balancing import BinBudgetError
from dataserver.planning.costs.model import items_ns
from dataserver.planning.job.fields import BalancePolicy, ModuleSpec
from dataserver.planning.layouts.colocated.budgets import check_total
from dataserver.planning.layouts.colocated.items import ModuleItems
from dataserver.planning.layouts.colocated.spreading import check_alone
from dataserver.planning.layouts.shared.limits import BackboneLimits, largest_images, together
from dataserver.planning.plan.naming import counted
from dataserver.planning.stream.samples import ShardTable
from dataserver.planning.stream.sizing import SampleTooLargeError
from dataserver.planning.stream.statistics import ShardStatistics


@dataclass(frozen=True, slots=True)
class ColocatedLimits(BackboneLimits):
    """Images of a sample belong to no wave, but to one round, which encoders keep whole until their backward phase."""

    def clear_together(self, module: ModuleSpec, statistics: ShardStatistics) -> Bool:
        """Say which shards have no sample whose images no round holds. bool [s]."""
        return surely_retained(module, statistics.together, largest_images(self.spec.stream, statistics))

    def check_together(self, module: ModuleSpec, table: ShardTable, samples: Bool, where: str) -> None:
        """Refuse samples whose images no round holds."""
        units = module.step_units
        for i, sizes, depths in () if units is None else together(module, table, samples, units):
            if not round_holds(_sample_items(module, sizes, depths)):
                raise SampleTooLargeError(over_step_memory(module, f"{where}, row {table.row[i]}", sizes))


def surely_retained(module: ModuleSpec, patches: I64, largest: I64) -> Bool:
    """Whether a round holds images of a sequence whatever their sizes; int64 [s] all of them, and the largest one.

    One rank keeps them; or they are dealt out so evenly that the last one finds a rank with room. bool [s].
    """
    units = module.step_units
    if units is None:
        return np.ones(len(patches), np.bool_)
    spread = 0 if module.balance.keeps_order else module.dp * np.maximum(units - largest, 0)
    return patches <= np.maximum(units, spread)


def round_holds(items: ModuleItems) -> bool:
    """Whether a round holds a module's items of one sequence, in as many microbatches as that takes."""
    module, sizes = items.module, items.sizes
    if (
        module.holds_samples
        or surely_retained(module, sizes.sum(keepdims=True), sizes.max(keepdims=True, initial=0)).all()
    ):
        return True
    if module.balance is BalancePolicy.NONE:  # all of them on the rank of their sequence
        return False
    try:
        check_total(items, 1)
        check_alone(items)
    except BinBudgetError:
        return False
    return True


def most_retained(module: ModuleSpec) -> int | None:
    """Patches of one sample's images that the ranks of a module keep at once; None where the job does not say."""
    units = module.step_units
    return None if units is None else units * (1 if module.balance is BalancePolicy.NONE else module.dp)


def over_step_memory(module: ModuleSpec, sample: str, sizes: I64) -> str:
    """Why a sample cannot be planned; int64 [k] are the patches of its images."""
    total, most = int(sizes.sum()), most_retained(module)
    problem = "" if most is None or total > most else ", and no way was found to spread them"
    ranks = f"{module.balance} balance, {counted(module.dp, 'rank')}"
    return (
        f"{sample}: its images have {total} patches, which module {module.name} keeps until its backward phase, but "
        f"memory.step_bytes holds {most} of a sample ({ranks}){problem}; raise memory.step_bytes or dp, or leave such "
        "samples out"
    )


def _sample_items(module: ModuleSpec, sizes: I64, depths: I64 | None) -> ModuleItems:
    """Images of one sample, int64 [k] patches, as items of a step; depths int64 [k] where there are videos."""
    zeros, loads = np.zeros_like(sizes), items_ns(module.cost, sizes, depths)
    return ModuleItems(module, np.arange(len(sizes)), sizes, loads, zeros, zeros, None)
