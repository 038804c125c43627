"""What ranks measured of a step, beside its plan."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from disttrain.v1.data_service_pb2 import StepTimes

from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.interface import PlannedTimeline
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import timeline
from dataserver.planning.simulation import simulate

MAX_PASS_NS: Final = 3600 * 10**9
"""Longest pass that is believed; far below what a profile may hold, since the passes of a whole step are added up."""
Key = tuple[str, int, int]
"""Module, rank and stage that a time belongs to."""


def measured_document(
    job: Job, plan: StepPlan, reports: Sequence[StepTimes]
) -> tuple[dict[str, Any], PlannedTimeline | None]:
    """What was measured, and the planned step with the passes that were measured.

    A later report of the same rank and stage counts. Reports of ranks or microbatches that the job does not have are
    counted and left out.

    Args:
        job: the job.
        plan: of the step.
        reports: of the step, from its job.

    Returns:
        The document, in which `replaced` counts the ranks and stages whose times the timeline has, of `expected`; and
        the timeline, None where no planned pass can be replaced by a measured one.
    """
    planned = timeline(job.spec, plan)
    fitting = {(r.module, r.rank, r.stage): r for r in reports if _fits(job, plan, r)}
    forward, backward = planned.pipeline.forward_ns.copy(), planned.pipeline.backward_ns.copy()
    chunks = planned.pipeline.num_chunks
    expected: dict[Key, tuple[int, int]] = {}
    replaced: set[Key] = set()
    for number, node in enumerate(planned.nodes):
        for chunk, module in enumerate(node.modules):
            block, key = number * chunks + chunk, (module, node.rank, node.stage)
            one, other = expected.get(key, (0, 0))
            expected[key] = one + int(forward[block].sum()), other + int(backward[block].sum())
            report = fitting.get(key)
            if report is None or node.modules.count(module) > 1:  # times of chunks come as one number
                continue
            replaced.add(key)
            forward[block] = list(report.forward_ns)
            if report.backward_ns:
                backward[block] = list(report.backward_ns)
    if job.spec.execution.identity_routing:
        replaced.clear()  # ranks of the backbone report its own passes, and the planned ones hold the encoders' too
    document = {
        "reports": len(reports),
        "left_out": len(reports) - _count(reports, fitting),
        "replaced": len(replaced),
        "expected": len(expected),
        "rows": [_row(key, report, expected.get(key, (0, 0))) for key, report in sorted(fitting.items())],
    }
    if not replaced:
        return document, None
    pipeline = replace(planned.pipeline, forward_ns=forward, backward_ns=backward)
    return document, PlannedTimeline(planned.nodes, pipeline, simulate(pipeline))


def _count(reports: Sequence[StepTimes], fitting: Mapping[Key, StepTimes]) -> int:
    return sum((r.module, r.rank, r.stage) in fitting for r in reports)


def _fits(job: Job, plan: StepPlan, report: StepTimes) -> bool:
    module = next((m for m in job.spec.execution.modules if m.name == report.module), None)
    if module is None or report.rank >= module.dp or report.stage >= module.pp:
        return False
    times = np.array([*report.forward_ns, *report.backward_ns], np.float64)
    whole = len(report.forward_ns) == plan.num_microbatches and len(report.backward_ns) in (0, plan.num_microbatches)
    return whole and bool(((times >= 0) & (times <= MAX_PASS_NS)).all())


def _row(key: Key, report: StepTimes, expected: tuple[int, int]) -> dict[str, Any]:
    return {
        "module": key[0],
        "rank": key[1],
        "stage": key[2],
        "planned_ns": sum(expected),
        "computed_ns": sum(report.forward_ns) + sum(report.backward_ns),
        "step_ns": report.step_time.ToNanoseconds(),
        "wait_ns": report.data_wait.ToNanoseconds(),
    }
