"""A simulated step as Chrome trace events, for ui.perfetto.dev and chrome://tracing."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from dataserver.cli.timelines import bars_of, labels_of, modules_of
from dataserver.planning.identity import Job
from dataserver.planning.jobspec import ModuleKind, ModuleSpec
from dataserver.planning.layouts import PlannedTimeline
from dataserver.planning.plan import StepPlan
from dataserver.planning.samples import I64

Event = dict[str, Any]
CRITICAL_PATH = "critical path"
SIZES = ("samples", "tokens", "patches")


def write_trace(job: Job, plan: StepPlan, planned: PlannedTimeline, path: Path) -> None:
    """Write the events of a plan: a process for each module, a thread for each rank and stage, and the critical path.

    Args:
        job: the job.
        plan: the plan of one of its steps.
        planned: what the simulator says of it.
        path: JSON file in the Trace Event Format.
    """
    events = [*_names(planned), *_operations(job, plan, planned)]
    about = {"job_id": plan.job_id, "step": plan.step, "makespan_ns": planned.makespan_ns}
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, allow_nan=False))


def _names(planned: PlannedTimeline) -> list[Event]:
    """What the processes and threads are called, and their order."""
    modules = [*modules_of(planned), CRITICAL_PATH]
    found = []
    for process, module in enumerate(modules):
        found.append(_about("process_name", process, 0, name=module))
        found.append(_about("process_sort_index", process, 0, sort_index=process))
    for node, label in enumerate(labels_of(planned)):
        process = modules.index(planned.nodes[node].modules[0])
        found.append(_about("thread_name", process, node, name=label))
        found.append(_about("thread_sort_index", process, node, sort_index=node))
    return [*found, _about("thread_name", len(modules) - 1, 0, name=CRITICAL_PATH)]


def _about(what: str, process: int, thread: int, **values: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": values}


def _operations(job: Job, plan: StepPlan, planned: PlannedTimeline) -> list[Event]:
    modules = modules_of(planned)
    sizes = {module: microbatch_sizes(plan, job.spec.execution.module(module)) for module in modules}
    found, labels = [], labels_of(planned)
    for node, bars in enumerate(bars_of(planned)):
        rank, stage = planned.nodes[node].rank, planned.nodes[node].stage
        for bar in bars:
            module = bar.module
            values = dict(zip(SIZES, sizes[module][:, rank, bar.microbatch].tolist(), strict=True))
            name = f"{'F' if bar.forward else 'B'} {bar.microbatch}"
            event = {
                "ph": "X",
                "name": name,
                "cat": "forward" if bar.forward else "backward",
                "ts": bar.start_ns / 1e3,
                "dur": (bar.end_ns - bar.start_ns) / 1e3,
                "pid": modules.index(module),
                "tid": node,
                "args": {"rank": rank, "stage": stage, "microbatch": bar.microbatch, **values},
            }
            found.append(event)
            if bar.critical:
                title = f"{labels[node]}: {name}"
                found.append({**event, "name": title, "cat": "critical", "pid": len(modules), "tid": 0})
    return found


def microbatch_sizes(plan: StepPlan, module: ModuleSpec) -> I64:
    """What each microbatch of a module holds: int64 [3, ranks, microbatches], in the order of `SIZES`.

    Samples, their backbone tokens, and the patches of all their images (backbone) or of the images that the module
    handles.
    """
    samples, arrangement = plan.samples, plan.arrangement(module.name)
    image_sample, patches = samples.image_sample, samples.patches
    item = arrangement.item
    of_sample = np.bincount(image_sample, patches, len(samples)).astype(np.int64)
    backbone = module.kind is ModuleKind.BACKBONE
    sample, work = (item, of_sample[item]) if backbone else (image_sample[item], patches[item])
    place = arrangement.rank * plan.num_microbatches + arrangement.microbatch
    _, first = np.unique(place * max(len(samples), 1) + sample, return_index=True)  # a document has several images
    sizes = np.zeros((3, module.dp * plan.num_microbatches), np.int64)
    np.add.at(sizes[0], place[first], 1)
    np.add.at(sizes[1], place[first], samples.tokens[sample[first]])
    np.add.at(sizes[2], place, work)
    return sizes.reshape(3, module.dp, plan.num_microbatches)
