"""How long the rows of sequences take between modules and stages, as the search for a placement counts it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64
from dataserver.planning.costs.model import transfer_ns
from dataserver.planning.job.fields import ModuleKind, ModuleSpec
from dataserver.planning.job.spec import JobSpec
from dataserver.planning.plan.arranging import TASK_OF, image_rows, module_images
from dataserver.planning.stream.samples import StepSamples


@dataclass(frozen=True, slots=True)
class Transfers:
    """The transfer of each row of a problem: behind an encoder, between stages of the backbone, before a generator."""

    least: I64
    """int64 [rows, s]: nanoseconds that each sequence's transfer takes at least, wherever it goes; 0 without."""
    smallest: I64
    """int64 [rows]: nanoseconds that a transfer with any rows takes at least: of one image, or of one sequence."""
    usual: I64
    """int64 [rows]: nanoseconds of the transfer of a mean microbatch, which simulations of components take for all."""
    returned: I64
    """int64 [rows]: 1 where gradients take the transfer back, 0 where the module that it begins at runs no backward."""


def problem_transfers(
    spec: JobSpec, modules: Sequence[ModuleSpec], samples: StepSamples, sequence: I64, num_waves: int, components: int
) -> Transfers | None:
    """The transfers of one step, modules by row, images spread within `components`; None if none takes time.

    Other arguments are those of `placement_problem`.
    """
    execution = spec.execution
    if execution.transfers is None:
        return None
    count, backbone = int(sequence.max(initial=-1)) + 1, execution.backbone
    least = np.zeros((len(modules), count), np.int64)
    smallest, usual = np.zeros((2, len(modules)), np.int64)
    for row, module in enumerate(modules):
        ends, most = (module.name, backbone.name), np.zeros(count, np.int64)
        if module.kind is ModuleKind.BACKBONE:
            rows, parts = samples.tokens, 1
            np.add.at(most, sequence, rows)
            fewest = most
        else:  # images of a sequence may come from several ranks
            images, parts = module_images(spec, module, samples), module.dp // components
            rows = image_rows(spec.stream, samples, images, TASK_OF[module.kind])
            np.maximum.at(most, sequence[samples.image_sample[images]], rows)
            fewest = rows
        transfer = execution.transfer(*(ends[::-1] if module.kind is ModuleKind.GENERATOR else ends))
        least[row] = np.where(most > 0, transfer_ns(transfer, most), 0)
        smallest[row] = transfer_ns(transfer, fewest).min() if len(fewest) else 0
        transfers = min(backbone.dp * num_waves * parts, max(len(rows), 1))  # none without an image
        usual[row] = transfer_ns(transfer, np.array(int(rows.sum()) // transfers))
    encoders = [m.kind is ModuleKind.ENCODER for m in modules]
    sources = [m if encodes else backbone for m, encodes in zip(modules, encoders, strict=True)]
    return Transfers(least, smallest, usual, np.array([m.runs_backward for m in sources], np.int64))
