"""What the cost model expects of a plan: the loads of its ranks, and what they hold."""

from collections.abc import Sequence

import numpy as np

from dataserver.planning import I64
from dataserver.planning.balancing import bin_totals
from dataserver.planning.costs.model import forward_ns, items_ns
from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.job.spec import Execution
from dataserver.planning.plan.plan import ArrangedStep, Arrangement
from dataserver.planning.stream.samples import StepSamples


def item_sizes(module: ModuleSpec, samples: StepSamples) -> I64:
    """Tokens of every sample, or patches of every image: what the items of a module are sized in. int64."""
    return samples.tokens if module.holds_samples else samples.patches


def item_times(module: ModuleSpec, samples: StepSamples) -> I64:
    """Forward time of every sample, or of every image. int64."""
    if module.holds_samples or samples.image_depths is None:
        return forward_ns(module.cost, item_sizes(module, samples))
    return items_ns(module.cost, samples.patches, samples.image_depths.astype(np.int64))


def loads(execution: Execution, plan: ArrangedStep) -> dict[str, I64]:
    """For each module int64 [dp, microbatches]: `microbatch_loads`."""
    return {m.name: microbatch_loads(m, plan) for m in execution.modules}


def item_sums(module: ModuleSpec, arrangement: Arrangement, values: I64, num_microbatches: int) -> I64:
    """Sums over the items of every microbatch of a module, padding included. int64 [dp, microbatches].

    `values` are int64 [n], sizes (`item_sizes`) or times of all items of the step.
    """
    place = arrangement.rank * num_microbatches + arrangement.microbatch
    count = module.dp * num_microbatches
    return bin_totals(values[arrangement.item], place, count, padded=module.padded).reshape(module.dp, -1)


def microbatch_loads(module: ModuleSpec, plan: ArrangedStep) -> I64:
    """Forward time of every microbatch in the whole module, padding included. int64 [dp, microbatches]."""
    times = item_times(module, plan.samples)
    return module.cost.microbatch_ns + item_sums(module, plan.arrangement(module.name), times, plan.num_microbatches)


def held_units(module: ModuleSpec, plan: ArrangedStep) -> I64:
    """Tokens or patches, padding included, of every microbatch on one device. int64 [dp, microbatches]."""
    sizes = item_sizes(module, plan.samples)
    return item_sums(module, plan.arrangement(module.name), sizes, plan.num_microbatches)


def padding_ppm(module: ModuleSpec, plan: ArrangedStep) -> int:
    """Share of a module's planned work that pads items to the largest of their microbatch, in millionths."""
    if not module.padded:
        return 0
    padded = int(microbatch_loads(module, plan).sum())
    plain = int(microbatch_loads(module.model_copy(update={"padded": False}), plan).sum())
    return (padded - plain) * 1_000_000 // padded if padded else 0


def imbalance(loads: Sequence[int]) -> float:
    """Largest load over mean load; 1 is perfect balance. For people, never for decisions."""
    total = int(sum(loads))
    return 1.0 if total == 0 else int(max(loads)) * len(loads) / total
