"""The page of a step as JSON: planned beside measured, what the step's time is spent on, and other ways to run it.

Plans are made here from the indexes, as by `dataserver plan` and `dataserver simulate`; what was measured comes from
the servers to which the job's trainers reported it.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from http import HTTPStatus
from typing import Any, Final

from disttrain.v1.data_service_pb2 import StepTimes

from dataserver.dataset import Dataset, Progress, printable
from dataserver.jobs import JobPlanner
from dataserver.planning.layouts.interface import PlannedTimeline
from dataserver.planning.plan.expectation import imbalance
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import PlanSummary, ablation, explain
from dataserver.planning.simulation import OperationKind
from dataserver.reporting.ablation import mean_ablation
from dataserver.reporting.alternatives import alternatives_of, changes
from dataserver.reporting.comparison import Outcome, compare
from dataserver.reporting.timelines import bars_of, critical_ns, labels_of, modules_of
from dataserver.web.background import Background
from dataserver.web.datasets import number
from dataserver.web.jobs import Jobs, PickedJob
from dataserver.web.measured import measured_document
from dataserver.web.reports import StepReports
from dataserver.web.server import Query, RequestError
from dataserver.web.step_costs import costs_of

MAX_BARS: Final = 40_000
"""Operations that a page draws; of larger steps fewer nodes are shown."""
MAX_ROWS: Final = 512
"""Nodes that a page draws."""
MAX_STEP: Final = 1 << 53
MAX_LOADS: Final = 4096
"""Ranks of a module whose loads are listed."""
KINDS: Final = tuple(OperationKind)


class StepPages:
    """The steps of jobs. Thread-safe."""

    def __init__(self, jobs: Jobs, datasets: Mapping[str, Dataset], work: Background, reports: StepReports) -> None:
        """Show the steps of jobs, as far as these may be shown.

        Args:
            jobs: says which.
            datasets: of this machine, by name: they tell the keys of samples.
            work: does what takes longer.
            reports: what servers hold of measured times.
        """
        self._jobs, self._datasets, self._work, self._reports = jobs, datasets, work, reports

    def step(self, query: Query) -> dict[str, Any]:
        """How one step is planned, once it is worked out; of one before the job's first step, that one."""
        job, step = self._wanted(query)
        return self._work.ask(("step", job.key, step), lambda _: self._step(job.open(), step))

    def policies(self, query: Query) -> dict[str, Any]:
        """What the same step would cost if the job were run in other ways, once it is worked out."""
        job, step = self._wanted(query)
        return self._work.ask(("policies", job.key, step), lambda progress: _policies(job.open(), step, progress))

    def measured(self, query: Query) -> dict[str, Any]:
        """What ranks reported of the step, beside the plan; the plan has to be worked out before."""
        job, step = self._wanted(query)
        planner = job.opened
        if planner is None:
            raise RequestError("the job is being opened; ask again", HTTPStatus.SERVICE_UNAVAILABLE)
        reports, problems = self._reports.of_step(planner.job.job_id, step)
        digest = sha256(b"".join(sha256(r.SerializeToString(deterministic=True)).digest() for r in reports)).digest()
        answer = self._work.ask(("measured", job.key, step, digest), lambda _: _measured(job.open(), step, reports))
        if "found" not in answer:
            return answer
        silent = [{"server": printable(name, 256), "why": printable(why, 256)} for name, why in problems.items()]
        return {"found": {**answer["found"], "silent": silent}}

    def listed(self, query: Query) -> dict[str, Any]:
        """The jobs that there are to choose from."""
        return self._jobs.listed(query)

    def _wanted(self, query: Query) -> tuple[PickedJob, int]:
        """The job and the step that a request names, if they may be shown."""
        return self._jobs.pick(query), number(query, "step", 0, MAX_STEP)

    def _step(self, planner: JobPlanner, step: int) -> dict[str, Any]:
        step = max(step, planner.first_step)
        plan = planner.plan(step)
        return planner.aside(lambda: self._document(planner, plan))

    def _document(self, planner: JobPlanner, plan: StepPlan) -> dict[str, Any]:
        summary = explain(planner.job, plan)
        samples = plan.samples
        return {
            "job": planner.job.job_id,
            "step": plan.step,
            "first_step": planner.first_step,
            "num_steps": planner.num_steps,
            "plan": plan.hash.hex(),
            "layout": planner.job.spec.execution.layout.kind,
            "samples": len(samples),
            "images": len(samples.image_rows),
            "tokens": int(samples.tokens.sum()),
            "microbatches": plan.num_microbatches,
            "bound_ns": summary.bound_ns,
            "before": _timeline(summary.before),
            "after": _timeline(summary.after),
            "loads": [_loads(name, summary) for name in modules_of(summary.after)],
            "ablation": [
                {
                    "name": row.name,
                    "step_ns": row.step_ns,
                    "of_before": row.of_the_one_before,
                    "of_first": row.of_the_first,
                }
                for row in mean_ablation([ablation(planner.job, plan)])
            ],
            "candidates": [{"name": c.name, "step_ns": c.makespan_ns} for c in plan.candidates],
            "decisions": [{"subject": d.subject, "chosen": d.chosen, "reason": d.reason} for d in plan.decisions],
            **costs_of(planner.job, plan, summary.after, self._datasets),
        }


def _policies(planner: JobPlanner, step: int, progress: Progress) -> list[dict[str, Any]]:
    outcomes = planner.aside(lambda: compare(planner, alternatives_of(planner.job), [step], progress, timed=False))
    return [_outcome(outcome, outcomes[0]) for outcome in outcomes]


def _measured(planner: JobPlanner, step: int, reports: Sequence[StepTimes]) -> dict[str, Any]:
    plan = planner.plan(step)
    found, timeline = planner.aside(lambda: measured_document(planner.job, plan, reports))
    return {**found, "timeline": None if timeline is None else _timeline(timeline)}


def step_routes(pages: StepPages) -> dict[str, Callable[[Query], Any]]:
    """What the page of steps asks for."""
    return {
        "/api/jobs": pages.listed,
        "/api/step": pages.step,
        "/api/step/policies": pages.policies,
        "/api/step/measured": pages.measured,
    }


def _timeline(planned: PlannedTimeline) -> dict[str, Any]:
    """Nodes and what they compute, as columns; those of the critical path first where there are too many."""
    bars = bars_of(planned)
    labels, modules = labels_of(planned), modules_of(planned)
    rows: list[int] = []
    room = MAX_BARS
    for node in sorted(range(len(bars)), key=lambda n: not any(bar.critical for bar in bars[n])):
        room -= len(bars[node])
        if rows and (room < 0 or len(rows) == MAX_ROWS):
            break
        rows.append(node)
    rows.sort()
    drawn = [(row, bar) for row, node in enumerate(rows) for bar in bars[node]]
    return {
        "makespan_ns": planned.makespan_ns,
        "bubble": planned.timeline.bubble_ppm / 1e6,
        "critical_ns": critical_ns(planned),
        "nodes": len(planned.nodes),
        "labels": [labels[node] for node in rows],
        "modules": modules,
        "kinds": [kind.value for kind in KINDS],
        "bars": {
            "row": [row for row, _ in drawn],
            "module": [modules.index(bar.module) for _, bar in drawn],
            "kind": [KINDS.index(bar.kind) for _, bar in drawn],
            "microbatch": [bar.microbatch for _, bar in drawn],
            "start": [bar.start_ns for _, bar in drawn],
            "end": [bar.end_ns for _, bar in drawn],
            "critical": [int(bar.critical) for _, bar in drawn],
        },
    }


def _loads(name: str, summary: PlanSummary) -> dict[str, Any]:
    before, after = summary.loads_before[name].tolist(), summary.loads_after[name].tolist()
    return {
        "module": name,
        "ranks": len(after),
        "before": before[:MAX_LOADS],
        "after": after[:MAX_LOADS],
        "imbalance_before": imbalance(before),
        "imbalance_after": imbalance(after),
    }


def _outcome(outcome: Outcome, own: Outcome) -> dict[str, Any]:
    made, ours = outcome.figures, own.figures
    return {
        "heading": outcome.alternative.heading,
        "name": outcome.alternative.name,
        "own": outcome is own,
        "step_ns": None if made is None else made.step_ns,
        "of_own": None if made is None or ours is None else made.step_ns / max(ours.step_ns, 1),
        "bubble": None if made is None else made.bubble_percent / 100,
        "refusal": outcome.refusal,
        "changes": changes(own.alternative.execution, outcome.alternative.execution),
    }
