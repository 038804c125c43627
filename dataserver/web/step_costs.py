"""Which rank, stage and sample a planned step owes its time to: what lies on its critical path."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from dataserver.dataset import Dataset, describe
from dataserver.planning.job.fields import Modality
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.interface import PlannedTimeline
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.simulation import OperationKind, TimedOperation, critical_path
from dataserver.planning.stream.samples import ROW_BITS
from dataserver.reporting.timelines import labels_of

MOST: Final = 8
"""Nodes, and operations, that are listed."""


def costs_of(job: Job, plan: StepPlan, planned: PlannedTimeline, datasets: Mapping[str, Dataset]) -> dict[str, Any]:
    """The nodes on which the critical path spends most, and its longest operations with their largest samples.

    Args:
        job: the job.
        plan: of one of its steps.
        planned: what the simulator says of it.
        datasets: by name; they tell the keys of samples.
    """
    path, labels = critical_path(planned.pipeline, planned.timeline), labels_of(planned)
    spent: Counter[int] = Counter()
    for timed in path:
        spent[timed.node] += timed.end_ns - timed.start_ns
    longest = sorted(path, key=lambda timed: (timed.start_ns - timed.end_ns, timed.start_ns))
    return {
        "costly_nodes": [{"node": labels[node], "ns": ns} for node, ns in spent.most_common(MOST)],
        "costly_operations": [
            {
                "node": labels[timed.node],
                "kind": timed.operation.kind.value,
                "microbatch": timed.operation.microbatch,
                "start_ns": timed.start_ns,
                "ns": timed.end_ns - timed.start_ns,
                "sample": _largest(job, plan, planned, timed, datasets),
            }
            for timed in longest[:MOST]
        ],
    }


def _largest(
    job: Job, plan: StepPlan, planned: PlannedTimeline, timed: TimedOperation, datasets: Mapping[str, Dataset]
) -> dict[str, Any] | None:
    """The sample with the most tokens, or the largest image, of a microbatch; None where it holds none."""
    if timed.operation.kind is OperationKind.INTERACTION:
        return None
    node, microbatch = planned.nodes[timed.node], timed.operation.microbatch
    module = job.spec.execution.module(node.modules[timed.operation.chunk])
    arrangement = plan.arrangement(module.name)
    item = arrangement.item[arrangement.of(plan.groups.holder(module.name, node.rank, microbatch), microbatch)]
    if not len(item):
        return None
    samples = plan.samples
    work = samples.tokens[item] if module.holds_samples else samples.patches[item]
    n = int(np.argmax(work))
    sample = int(item[n]) if module.holds_samples else int(samples.locate(item[n : n + 1])[0][0])
    spec = job.spec.stream.datasets[int(samples.dataset[sample])]
    opened = datasets.get(spec.name)
    dataset = None if opened is None else opened.as_it_was(spec.fingerprint)
    place = divmod(int(samples.sample[sample]), 1 << ROW_BITS)
    return {
        "dataset": spec.name,
        "key": "" if dataset is None else next(iter(describe(dataset, [place])))[1].key,
        "unit": "tokens" if module.holds_samples else "positions" if module.reads is Modality.AUDIO else "patches",
        "size": int(work[n]),
        "share": float(work[n] / max(int(work.sum()), 1)),
        "of": len(item),
    }
