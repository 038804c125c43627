"""One step: from sized samples to a plan, and what it gains."""

from dataclasses import dataclass, replace

from dataserver.planning import I64
from dataserver.planning.job.identity import Job, identify
from dataserver.planning.job.spec import Execution, JobSpec
from dataserver.planning.layouts.interface import Layout, PlannedTimeline, layout_of
from dataserver.planning.layouts.shared.candidates import ranked, shown
from dataserver.planning.plan.naming import milliseconds
from dataserver.planning.plan.plan import ArrangedStep, Candidate, Decision, StepPlan, make_plan
from dataserver.planning.simulation import Program
from dataserver.planning.stream.samples import StepSamples


def plan_step(job: Job, step: int, samples: StepSamples) -> StepPlan:
    """Plan one step from its samples in canonical order (`order`, `sizing`).

    Raises:
        ValueError: a module's memory cannot hold a sample; names it and the limit.
    """
    layout = layout_of(job.spec.execution)
    return _never_slower(layout, job, layout.plan(job, step, samples))


def _never_slower(layout: Layout, job: Job, plan: StepPlan) -> StepPlan:
    """The plan, or that of a finalist of its layout which is faster."""
    own_ns = _makespan_ns(layout, job, plan)
    best, best_ns, chosen = plan, own_ns, ""
    beside = list(plan.candidates) or [Candidate("the job's own policies", own_ns)]
    for entry in layout.finalists(job):
        try:
            found = layout.plan(_running(job, entry.execution), plan.step, plan.samples)
        except ValueError:  # canonical order within the memory of the job, for example
            continue
        makespan = _makespan_ns(layout, job, found)
        beside.append(Candidate(entry.name, makespan))
        if makespan < best_ns:
            best, best_ns, chosen = found, makespan, entry.name
    if best is plan:
        return plan
    reason = f"simulated {milliseconds(best_ns)}, against {milliseconds(own_ns)} by the job's own policies"
    return replace(
        make_plan(job, plan.step, best),
        candidates=shown(ranked(beside)),
        decisions=(Decision("step", f"as in the ablation: {chosen}", reason), *best.decisions),
    )


def _makespan_ns(layout: Layout, job: Job, plan: StepPlan) -> int:
    """Simulated time of a plan; the job's costs are those of all its ways to run."""
    return plan.candidates[0].makespan_ns if plan.candidates else layout.timeline(job.spec, plan).makespan_ns


def baseline_plan(job: Job, step: int, samples: StepSamples) -> StepPlan:
    """The same step in canonical order: unbalanced and unordered."""
    return plan_step(_running(job, layout_of(job.spec.execution).ablation(job)[0].execution), step, samples)


def _running(job: Job, execution: Execution) -> Job:
    """The same stream, run in another way."""
    return identify(job.spec.model_copy(update={"execution": execution}))


def programs(execution: Execution, plan: ArrangedStep) -> tuple[Program, ...]:
    """What every stage does: the programs that `timeline` simulates and the trainer runs."""
    return layout_of(execution).programs(execution, plan.schedules, plan.num_microbatches)


def timeline(spec: JobSpec, plan: StepPlan) -> PlannedTimeline:
    """Simulate a plan: every rank of every stage."""
    return layout_of(spec.execution).timeline(spec, plan)


def module_loads(spec: JobSpec, plan: StepPlan) -> dict[str, I64]:
    """For each module int64 [dp]: planned forward time of each rank over the step, nanoseconds."""
    loads = layout_of(spec.execution).loads(spec.execution, plan)
    return {m.name: loads[m.name].sum(axis=1) for m in spec.execution.modules}


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan beside the baseline: the same samples in canonical order, unbalanced and unordered."""

    baseline: StepPlan
    plan: StepPlan
    loads_before: dict[str, I64]
    """For each module int64 [dp]: forward time of each rank over the step, nanoseconds."""
    loads_after: dict[str, I64]
    before: PlannedTimeline
    after: PlannedTimeline
    bound_ns: int
    """A time that no plan of the same sequences can beat."""


def explain(job: Job, plan: StepPlan) -> PlanSummary:
    """What a plan gains over the baseline, as the simulator sees it."""
    baseline = baseline_plan(job, plan.step, plan.samples)
    return PlanSummary(
        baseline=baseline,
        plan=plan,
        loads_before=module_loads(job.spec, baseline),
        loads_after=module_loads(job.spec, plan),
        before=timeline(job.spec, baseline),
        after=timeline(job.spec, plan),
        bound_ns=layout_of(job.spec.execution).lower_bound_ns(job, plan),
    )


@dataclass(frozen=True, slots=True)
class AblationResult:
    """An entry of the ablation with what the simulator expects of one step."""

    name: str
    """What is new, as of `AblationEntry`."""
    makespan_ns: int | None
    """None where the step cannot be planned so."""


def ablation(job: Job, plan: StepPlan) -> tuple[AblationResult, ...]:
    """What each change on the way from the baseline to the plan brings; the first is the baseline, the last the plan.

    Plans the step once for each of the others.
    """
    *others, own = layout_of(job.spec.execution).ablation(job)
    found = []
    for entry in others:
        running = _running(job, entry.execution)
        try:
            makespan = timeline(running.spec, plan_step(running, plan.step, plan.samples)).makespan_ns
        except ValueError:  # canonical order within the memory of the job, for example
            makespan = None
        found.append(AblationResult(entry.name, makespan))
    return *found, AblationResult(own.name, timeline(job.spec, plan).makespan_ns)
