"""What the simulator expects of the same steps under different policies."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Final

import numpy as np

from dataserver.planning.expectation import imbalance
from dataserver.planning.identity import Job, identify
from dataserver.planning.jobspec import BalancePolicy, OrderPolicy, PackingPolicy, PipelineLayout
from dataserver.planning.planner import explain, plan_step
from dataserver.planning.samples import StepSamples
from dataserver.serving.jobs import JobPlanner

EXTRA_IN_FLIGHT: Final = (0, 1, 2)
"""Tried with the job's own policies."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to plan a job's steps."""

    packing: PackingPolicy | None
    balance: BalancePolicy
    order: OrderPolicy
    extra_in_flight: int | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over the steps."""

    choice: Choice
    step_ns: int
    bound_ns: int
    """A time that no placement of the same sequences can beat."""
    bubble_percent: float
    imbalance: dict[str, float]
    """For each module: largest forward load of a rank over the mean one."""
    microbatches: float
    fill_percent: float
    """Tokens over those that the sequences in use could hold."""
    empty_percent: float
    """Share of the sequence slots that hold no sample."""
    planning_ns: int
    """CPU time of a plan."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One step under one choice."""

    makespan_ns: int
    bound_ns: int
    bubble_ppm: int
    imbalance: dict[str, float]
    microbatches: int
    fill: float
    empty: float
    planning_ns: int


def choices_of(job: Job) -> list[Choice]:
    """Every combination of policies, the job's own first; then its own with other microbatches in flight.

    Packing is left alone where the stream packs nothing.
    """
    execution, layout = job.spec.execution, job.spec.execution.layout
    assert isinstance(layout, PipelineLayout)
    backbone = execution.backbone
    own = Choice(backbone.packing, backbone.balance, layout.order, layout.extra_in_flight)
    packings = list(PackingPolicy) if job.stream.packing.enabled else [own.packing]
    found = [
        Choice(packing, balance, order, own.extra_in_flight)
        for packing, balance, order in product(packings, (BalancePolicy.NONE, BalancePolicy.LPT), OrderPolicy)
    ]
    found += [Choice(own.packing, own.balance, own.order, extra) for extra in EXTRA_IN_FLIGHT]
    return list(dict.fromkeys([own, *found]))


def compare(planner: JobPlanner, steps: Sequence[int], report: Callable[[int, int], None]) -> list[Outcome]:
    """Plan the steps under every choice and simulate them, in the order of `choices_of`.

    Args:
        planner: of the job.
        steps: at least one.
        report: is told how many plans of how many are made.
    """
    choices = choices_of(planner.job)
    jobs = [_job_with(planner.job, choice) for choice in choices]
    found: list[list[_Step]] = [[] for _ in choices]
    for done, step in enumerate(steps):
        samples = planner.samples(step)
        for number, job in enumerate(jobs):
            if done == 0:
                plan_step(job, step, samples)  # loads the kernels, which is not to count as planning
            found[number].append(_plan(job, step, samples))
            report(done * len(jobs) + number + 1, len(steps) * len(jobs))
    return [_outcome(*pair) for pair in zip(choices, found, strict=True)]


def _job_with(job: Job, choice: Choice) -> Job:
    execution = job.spec.execution
    modules = tuple(
        m.model_copy(update={"balance": choice.balance, **({"packing": choice.packing} if m.packing else {})})
        for m in execution.modules
    )
    layout = execution.layout.model_copy(update={"order": choice.order, "extra_in_flight": choice.extra_in_flight})
    changed = execution.model_copy(update={"modules": modules, "layout": layout})
    return identify(job.spec.model_copy(update={"execution": changed}))


def _plan(job: Job, step: int, samples: StepSamples) -> _Step:
    started = time.thread_time_ns()
    plan = plan_step(job, step, samples)
    spent = time.thread_time_ns() - started
    summary = explain(job, plan)
    execution, place = job.spec.execution, plan.arrangement(job.spec.execution.backbone.name)
    slots = execution.backbone.dp * plan.num_microbatches * execution.microbatch
    used = len(np.unique(np.stack([place.rank, place.microbatch, place.slot]), axis=1).T)
    return _Step(
        makespan_ns=summary.after.makespan_ns,
        bound_ns=summary.bound_ns,
        bubble_ppm=summary.after.timeline.bubble_ppm,
        imbalance={name: imbalance(loads.tolist()) for name, loads in summary.loads_after.items()},
        microbatches=plan.num_microbatches,
        fill=int(samples.tokens.sum()) / (max(used, 1) * job.stream.seq_len),
        empty=1 - used / slots,
        planning_ns=spent,
    )


def _outcome(choice: Choice, steps: Sequence[_Step]) -> Outcome:
    return Outcome(
        choice=choice,
        step_ns=sum(s.makespan_ns for s in steps) // len(steps),
        bound_ns=sum(s.bound_ns for s in steps) // len(steps),
        bubble_percent=fmean(s.bubble_ppm for s in steps) / 1e4,
        imbalance={name: fmean(s.imbalance[name] for s in steps) for name in steps[0].imbalance},
        microbatches=fmean(s.microbatches for s in steps),
        fill_percent=100 * fmean(s.fill for s in steps),
        empty_percent=100 * fmean(s.empty for s in steps),
        planning_ns=sum(s.planning_ns for s in steps) // len(steps),
    )
