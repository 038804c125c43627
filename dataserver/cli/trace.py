"""A simulated step as Chrome trace events, for ui.perfetto.dev and chrome://tracing."""

from pathlib import Path

import numpy as np

from dataserver.chrome_trace import Event, bar, metadata, trace_json
from dataserver.outputs import write_whole
from dataserver.planning import I64
from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.interface import Node, PlannedTimeline
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.simulation import OperationKind
from dataserver.reporting.timelines import Bar, bars_of, labels_of, owner_of

CRITICAL_PATH = "critical path"
SIZES = ("samples", "tokens", "patches")


def write_trace(job: Job, plan: StepPlan, planned: PlannedTimeline, path: Path) -> None:
    """Write the events of a plan: a process for each module, a thread for each rank and stage, and the critical path.

    Modules that share their ranks are one process.

    Args:
        job: the job.
        plan: the plan of one of its steps.
        planned: what the simulator says of it.
        path: JSON file in the Trace Event Format.
    """
    events = [*_names(planned), *_operations(job, plan, planned)]
    about = {"job_id": plan.job_id, "step": plan.step, "makespan_ns": planned.makespan_ns}
    write_whole(path, trace_json(events, about))


def _names(planned: PlannedTimeline) -> list[Event]:
    """What the processes and threads are called, and their order."""
    processes = [*_processes(planned), CRITICAL_PATH]
    found = []
    for process, name in enumerate(processes):
        found.append(metadata("process_name", process, 0, name=name))
        found.append(metadata("process_sort_index", process, 0, sort_index=process))
    for node, label in enumerate(labels_of(planned)):
        process = processes.index(owner_of(planned.nodes[node]))
        found.append(metadata("thread_name", process, node, name=label))
        found.append(metadata("thread_sort_index", process, node, sort_index=node))
    return [*found, metadata("thread_name", len(processes) - 1, 0, name=CRITICAL_PATH)]


def _processes(planned: PlannedTimeline) -> list[str]:
    return list(dict.fromkeys(map(owner_of, planned.nodes)))


def _operations(job: Job, plan: StepPlan, planned: PlannedTimeline) -> list[Event]:
    processes = _processes(planned)
    sizes = {m.name: microbatch_sizes(plan, m) for m in job.spec.execution.modules}
    found, labels = [], labels_of(planned)
    for number, bars in enumerate(bars_of(planned)):
        node = planned.nodes[number]
        for planned_bar in bars:
            name, times = _name(planned_bar, node), (planned_bar.start_ns, planned_bar.end_ns)
            values = _held(planned_bar, node, sizes[planned_bar.module])
            about = {"rank": node.rank, "stage": node.stage, **values}
            process, category = processes.index(owner_of(node)), planned_bar.kind.value
            found.append(bar(process, number, name, category, *times, **about))
            if planned_bar.critical:
                title = f"{labels[number]}: {name}"
                found.append(bar(len(processes), 0, title, "critical", *times, **about))
    return found


def _name(bar: Bar, node: Node) -> str:
    name = f"{bar.kind.value[0].upper()} {bar.microbatch}"
    if len(set(node.modules)) > 1:
        return f"{bar.module} {name}"
    return f"{name}, chunk {bar.chunk}" if len(node.modules) > 1 else name


def _held(bar: Bar, node: Node, sizes: I64) -> dict[str, int]:
    """What an operation works on."""
    if bar.kind is OperationKind.INTERACTION:
        return {"contrastive_batch": bar.microbatch}
    values: list[int] = sizes[:, node.rank, bar.microbatch].tolist()
    return {"microbatch": bar.microbatch, **dict(zip(SIZES, values, strict=True))}


def microbatch_sizes(plan: StepPlan, module: ModuleSpec) -> I64:
    """What each microbatch of a module holds: int64 [3, ranks, microbatches], in the order of `SIZES`.

    Samples, their tokens, and the patches of all their images (backbone, text tower) or of the images that the module
    handles. All ranks of a sequence-parallel group hold the same.
    """
    samples, arrangement = plan.samples, plan.arrangement(module.name)
    image_sample, patches = samples.image_sample, samples.patches
    item = arrangement.item
    of_sample = np.bincount(image_sample, patches, len(samples)).astype(np.int64)
    sample, work = (item, of_sample[item]) if module.holds_samples else (image_sample[item], patches[item])
    place = arrangement.rank * plan.num_microbatches + arrangement.microbatch
    _, first = np.unique(place * max(len(samples), 1) + sample, return_index=True)  # a document has several images
    sizes = np.zeros((3, module.dp * plan.num_microbatches), np.int64)
    np.add.at(sizes[0], place[first], 1)
    np.add.at(sizes[1], place[first], samples.tokens[sample[first]])
    np.add.at(sizes[2], place, work)
    found = sizes.reshape(3, module.dp, plan.num_microbatches)
    if module.name == plan.groups.module:
        first = np.repeat(plan.groups.first_rank, plan.groups.degree).reshape(plan.num_microbatches, module.dp)
        found = np.take_along_axis(found, first.T[None], axis=1)
    return found
