"""Encoders, backbone stages and generators on devices of their own, wave by wave (DistTrain, arXiv 2408.04275)."""

from dataclasses import replace

import numpy as np

from dataserver.planning.job.fields import ModuleKind, ModuleSpec
from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.pipelined.comparing import Compared, TooShort, compare
from dataserver.planning.layouts.pipelined.counts import Counts, sample_sizes
from dataserver.planning.layouts.pipelined.placing import PlacementProblem, lower_bound_ns, placement_problem
from dataserver.planning.layouts.shared.candidates import shown
from dataserver.planning.layouts.shared.sequences import sequence_of_samples
from dataserver.planning.layouts.shared.waves import decisions
from dataserver.planning.plan.naming import milliseconds, sample_name
from dataserver.planning.plan.parity import parity_decision
from dataserver.planning.plan.plan import Decision, StepPlan, make_plan
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.sizing import SampleTooLargeError


def plan(job: Job, step: int, samples: StepSamples) -> StepPlan:
    """Plan one step.

    Microbatches are as many as the samples need, or 1.5, 2, 3, 4, 6, 8, ... times as many and smaller, whichever is
    simulated fastest: fewer bubbles against a fixed price of each. Memory leaves out what it does not hold. Where it
    holds none of these, there are as many as it takes, equally many on every rank.

    Every step of a job that the layout's limits accept has a plan: in the end every sample has a wave to itself, and
    with interleaved chunks so many waves without samples between it and the next that no two are in flight together.

    Raises:
        SampleTooLargeError: memory does not hold a sample, however many microbatches there are.
    """
    _check_tokens(job, samples)
    found = compare(Counts(job, step, samples, bool(job.spec.execution.modality_parity)))
    if isinstance(found, TooShort):
        raise _too_large(job, samples, found.module, found.num_microbatches)
    return _chosen(job, step, found)


def _chosen(job: Job, step: int, compared: Compared) -> StepPlan:
    """The fastest of the candidates, with what was decided."""
    candidates = compared.candidates
    best, plan = candidates[0], candidates[0].plan()
    fastest = {c.num_microbatches: c for c in reversed(candidates)}
    worth_showing = [
        c for c in candidates if c.num_microbatches == best.num_microbatches or c is fastest[c.num_microbatches]
    ]
    said = _decisions(job.spec.execution, compared)
    if job.spec.execution.modality_parity:
        said = (*said, parity_decision(job.spec.execution, plan))
    return replace(make_plan(job, step, plan), candidates=shown(worth_showing), decisions=said)


def _decisions(execution: Execution, compared: Compared) -> tuple[Decision, ...]:
    """Why each module holds what it does, why there are so many microbatches, and what the choice gained."""
    best, last = compared.candidates[0], compared.candidates[-1]
    time, said = milliseconds(best.makespan_ns), list(decisions(execution, best.in_flight))
    number, chosen = best.num_microbatches, f"{best.num_microbatches} microbatches of each rank"
    others = [c for c in compared.candidates if c.num_microbatches != number]
    elsewhere = next((c for c in others if c.num_microbatches == compared.fitting), others[0] if others else None)
    if compared.fewest < number == compared.fitting:
        said.append(Decision("step", chosen, f"with only {compared.fewest} they would exceed memory"))
    elif elsewhere is not None:
        beside = f"{milliseconds(elsewhere.makespan_ns)} with {elsewhere.num_microbatches}"
        said.append(Decision("step", chosen, f"simulated {time}, against {beside}"))
    other = next((c for c in compared.candidates if (c.extra > 0) is not (best.extra > 0)), None)
    if other is not None:
        reason = f"simulated {time}, against {milliseconds(other.makespan_ns)} with {other.extra}"
        said.append(Decision("step", f"{best.extra} extra in flight", reason))
    if len(compared.candidates) > 1:
        slowest = (
            f"the slowest of {len(compared.candidates)} plans takes {milliseconds(last.makespan_ns)} ({last.name})"
        )
        said.append(Decision("step", best.name, f"simulated {time}; {slowest}"))
    return tuple(said)


def _check_tokens(job: Job, samples: StepSamples) -> None:
    backbone = job.spec.execution.backbone
    limit = job.stream.seq_len if backbone.memory is None else min(backbone.memory.units, job.stream.seq_len)
    largest = int(samples.tokens.argmax()) if len(samples) else -1
    if largest >= 0 and samples.tokens[largest] > limit:
        raise SampleTooLargeError(
            f"{sample_name(job.stream, samples, largest)}: the sample has {samples.tokens[largest]} tokens, but a "
            f"microbatch of module {backbone.name} holds {limit} (the smaller of stream.seq_len and memory); raise "
            "memory.budget_bytes, lower stream.seq_len, or leave such samples out with a filter or a quarantine list"
        )


def _too_large(job: Job, samples: StepSamples, module: ModuleSpec | None, count: int) -> SampleTooLargeError:
    """What to say where no number of microbatches helps: the largest sample of the module that lacked memory."""
    if module is None or module.memory is None:
        raise RuntimeError("a step has no plan although no module lacks memory")
    sizes = sample_sizes(job, samples, module)
    largest, backbone = int(sizes.argmax()), module.kind is ModuleKind.BACKBONE
    remedies = ["raise memory.budget_bytes" if backbone else "raise memory.budget_bytes or dp of the module"]
    if module.padded:
        remedies.append("switch padding off")
    remedies.append("leave such samples out with a filter or a quarantine list")
    item, padding = "tokens" if backbone else "patches", ", padding included" if module.padded else ""
    return SampleTooLargeError(
        f"{sample_name(job.stream, samples, largest)}: the sample has {sizes[largest]} {item}, the most in module "
        f"{module.name}. Even in {count} microbatches, memory for {module.memory.units} on each of its ranks (dp "
        f"{module.dp}) cannot hold at once what the step needs{padding}: {', '.join(remedies[:-1])}, or {remedies[-1]}"
    )


def bound_ns(job: Job, plan: StepPlan) -> int:
    """A time that no plan of the same sequences can beat."""
    return lower_bound_ns(planned_problem(job, plan))


def planned_problem(job: Job, plan: StepPlan) -> PlacementProblem:
    """What placing the sequences of a plan depends on."""
    sequence = sequence_of_samples(plan, job.spec.execution.backbone.name)
    in_flight = np.concatenate([plan.in_flight(m.name) for m in job.spec.execution.by_depth])
    return placement_problem(job.spec, in_flight, plan.samples, sequence, plan.num_microbatches)
