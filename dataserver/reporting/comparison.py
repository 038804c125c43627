"""What the simulator expects of the same steps when they are planned in different ways."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

from dataserver.dataset import Progress
from dataserver.jobs import JobPlanner
from dataserver.planning.job.identity import Job, identify
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.plan.expectation import imbalance, padding_ppm
from dataserver.planning.planner import module_loads, plan_step
from dataserver.planning.stream.samples import StepSamples
from dataserver.reporting.alternatives import Alternative


@dataclass(frozen=True, slots=True)
class Figures:
    """One step, or means over steps, under one alternative."""

    step_ns: float
    bound_ns: float
    """A time that no placement of the same sequences can beat."""
    bubble_percent: float
    imbalance: dict[str, float]
    """For each module: largest forward load of a rank over the mean one."""
    padding_percent: dict[str, float]
    """For each padded module: share of its work that is padding."""
    in_flight: dict[str, float]
    """For each module: most microbatches that one of its stages holds at once; of parts of microbatches, their sum."""
    microbatches: float
    of_layout: dict[str, float]
    """Further figures in which plans of this layout differ (`layout.FIGURES`)."""
    planning_ns: float
    """CPU time of a plan; where plans were not to be timed, with the time to load kernels."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An alternative, and what came of it: figures, or why it cannot be planned."""

    alternative: Alternative
    figures: Figures | None
    refusal: str = ""


def compare(
    planner: JobPlanner,
    alternatives: Sequence[Alternative],
    steps: Sequence[int],
    report: Progress,
    timed: bool = True,
) -> list[Outcome]:
    """Plan the steps in every way and simulate them.

    Args:
        planner: of the job.
        alternatives: of its execution, the job's own first.
        steps: at least one.
        report: is told how many plans of how many are made.
        timed: each way is planned once more beforehand, so that `planning_ns` does not count the loading of kernels.

    Raises:
        ValueError: the job itself cannot be planned.
    """
    spec = planner.job.spec
    jobs = [identify(spec.model_copy(update={"execution": a.execution})) for a in alternatives]
    found: list[list[Figures]] = [[] for _ in jobs]
    refusals: dict[int, str] = {}
    for done, step in enumerate(steps):
        samples = planner.samples(step)
        for number, job in enumerate(jobs):
            try:
                if number not in refusals:
                    found[number].append(_figures(planner.job, job, step, samples, warm=timed and done == 0))
            except ValueError as error:
                if number == 0:
                    raise
                refusals[number] = f"step {step}: {error}"
            report(done * len(jobs) + number + 1, len(steps) * len(jobs))
    return [
        Outcome(alternative, None if number in refusals else _mean(found[number]), refusals.get(number, ""))
        for number, alternative in enumerate(alternatives)
    ]


def _figures(own: Job, job: Job, step: int, samples: StepSamples, warm: bool) -> Figures:
    """One step of an alternative; `own` is the job as it is."""
    if warm:
        plan_step(job, step, samples)  # loads the kernels, which is not to count as planning
    started = time.thread_time_ns()
    plan = plan_step(job, step, samples)
    spent = time.thread_time_ns() - started
    execution, layout = job.spec.execution, layout_of(job.spec.execution)
    simulated = layout.timeline(job.spec, plan)
    return Figures(
        step_ns=simulated.makespan_ns,
        bound_ns=layout.lower_bound_ns(job, plan),
        bubble_percent=simulated.timeline.bubble_ppm / 1e4,
        imbalance={name: imbalance(loads.tolist()) for name, loads in module_loads(job.spec, plan).items()},
        padding_percent={m.name: padding_ppm(m, plan) / 1e4 for m in execution.modules if m.padded},
        in_flight={s.module: int(s.in_flight.max()) / s.chunks for s in plan.schedules},
        microbatches=plan.num_microbatches,
        of_layout=dict(layout.figures(own, job, plan)),
        planning_ns=spent,
    )


def _mean(steps: Sequence[Figures]) -> Figures:
    """The mean of every figure."""
    found: dict[str, Any] = {}
    for field in fields(Figures):
        values = [getattr(step, field.name) for step in steps]
        if isinstance(values[0], dict):
            found[field.name] = {name: fmean(value[name] for value in values) for name in values[0]}
        else:
            found[field.name] = fmean(values)
    return Figures(**found)
