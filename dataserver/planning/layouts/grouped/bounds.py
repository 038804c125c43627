"""A time that no plan of a step with sequence-parallel groups can beat."""

import numpy as np

from dataserver.planning import I64
from dataserver.planning.costs.model import backward_ns, items_ns, transfer_ns
from dataserver.planning.job.fields import ModuleKind, ModuleSpec
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.grouped.batch import Batch
from dataserver.planning.layouts.grouped.options import GroupedOptions
from dataserver.planning.layouts.grouped.sequences import group_costs, planned_sequences
from dataserver.planning.layouts.shared.sequences import sequence_of_samples
from dataserver.planning.plan.arranging import TASK_OF, image_rows, module_images
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.stream.samples import StepSamples


def bound_ns(job: Job, plan: StepPlan) -> int:
    """A time that no groups and no order of the plan's sequences can beat.

    The backbone's: its sequences in the best degrees without any waiting (`batch.Batch.bound`). Those of the others:
    their work, evenly spread over their ranks. A generator's images wait for a transfer, and the backbone for their
    gradients; so the backbone and encoders do if all sequences have images.
    """
    backbone = job.spec.execution.backbone
    costs, sequences = group_costs(job.spec.execution), planned_sequences(backbone, plan)
    with_images, transfers = np.zeros(len(plan.samples), np.bool_), list[int]()
    order = np.argsort(-sequences.lengths, kind="stable")
    batch = Batch(sequences.lengths[order], costs, squares=sequences.squares[order])
    bound = least = batch.fewest * costs.fixed_ns + batch.bound(0, len(order))
    for module in job.spec.execution.modules:
        if module.name == backbone.name:
            continue
        images = module_images(job.spec, module, plan.samples)
        constants = np.full(batch.fewest * module.dp, module.cost.microbatch_ns)  # one by one: backwards round down
        times = items_ns(module.cost, plan.samples.patches[images], plan.samples.depths(images))
        forward = np.append(times, constants)
        both = forward + backward_ns(module.cost, forward)
        away = _away_ns(job, module, plan.samples, images)
        if module.kind is ModuleKind.GENERATOR:  # ranks may run microbatches without images meanwhile
            bound = max(bound, int(both[: len(images)].sum()) // module.dp + away)
        elif len(images):
            with_images[plan.samples.image_sample[images]] = True
            transfers.append(away)
        bound = max(bound, int(both.sum()) // module.dp)
    sequence = sequence_of_samples(plan, backbone.name)
    alike = len(np.unique(sequence[with_images])) == len(sequences.lengths)
    return max(bound, least + min(transfers)) if transfers and alike else bound


def _away_ns(job: Job, module: ModuleSpec, samples: StepSamples, images: I64) -> int:
    """Transfers, there and back to who runs a backward, that no image goes without; shared by the largest groups."""
    execution = job.spec.execution
    ends = (execution.backbone, module) if module.kind is ModuleKind.GENERATOR else (module, execution.backbone)
    transfer = execution.transfer(*(end.name for end in ends))
    rows = image_rows(job.stream, samples, images, TASK_OF[module.kind])
    least = -(-rows // execution.options(GroupedOptions).max_degree)
    transfers = 2 if ends[0].runs_backward else 1
    return transfers * int(transfer_ns(transfer, least).min()) if len(images) else 0
