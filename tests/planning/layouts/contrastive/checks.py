"""What holds for every plan of a contrastive job, and what the messages of refused ones advise."""

import re
from collections.abc import Iterator

import numpy as np

from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.plan.plan import StepPlan


def check_groups(job: Job, plan: StepPlan) -> None:
    """Every contrastive batch is whole in every tower, in microbatches of its own, all ranks with equal counts."""
    batch, layout = job.stream.contrastive_batch or 0, job.spec.execution.layout
    size: int = layout.microbatches  # type: ignore[union-attr]
    assert plan.num_microbatches * batch == len(plan.samples) * size
    for module in job.spec.execution.modules:
        arrangement = plan.arrangement(module.name)
        assert sorted(arrangement.item.tolist()) == list(range(len(plan.samples)))
        assert np.array_equal(arrangement.microbatch // size, arrangement.item // batch)
        cells = arrangement.rank * plan.num_microbatches + arrangement.microbatch
        counts = np.bincount(cells, minlength=module.dp * plan.num_microbatches)
        assert set(counts.tolist()) == {batch // module.dp // size}
        key = np.stack([arrangement.rank, arrangement.microbatch, arrangement.slot, arrangement.item])
        assert np.array_equal(key, key[:, np.lexsort(key[2::-1])])


def advised(job: Job, message: str) -> Iterator[Job]:
    """The job after each of the other changes that a message advises."""
    for field, number in re.findall(r"or (?:lower|raise) ([a-z.]+_?[a-z]+) to (\d+)", message):
        data = job.spec.model_dump(mode="json", exclude_none=True)
        part, name = field.split(".")
        place = data["stream"] if part == "stream" else data["execution"]["layout"]
        assert place[name] != int(number)
        place[name] = int(number)
        yield parse_job(data)
