"""Encoders, backbone stages and generators on devices of their own, wave by wave (DistTrain, arXiv 2408.04275)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dataserver.planning.identity import Job
from dataserver.planning.job import Execution
from dataserver.planning.jobspec import ModuleKind, ModuleSpec, OrderPolicy
from dataserver.planning.layout import canonical_modules
from dataserver.planning.naming import milliseconds, sample_name
from dataserver.planning.pipelined.attempts import Attempt, Option
from dataserver.planning.pipelined.counts import Counts, sample_sizes
from dataserver.planning.pipelined.options import PipelinedOptions
from dataserver.planning.pipelined.placing import lower_bound_ns, placement_problem
from dataserver.planning.plan import Candidate, Decision, StepPlan, make_plan
from dataserver.planning.samples import StepSamples
from dataserver.planning.sequences import sequence_of_samples
from dataserver.planning.sizing import SampleTooLargeError
from dataserver.planning.waves import decisions


def baseline(execution: Execution) -> Execution:
    """Best-fit packing, canonical order, images beside their backbone rank, as if memory were endless."""
    layout = execution.options(PipelinedOptions).model_copy(update={"order": OrderPolicy.NONE})
    return execution.model_copy(update={"modules": canonical_modules(execution), "layout": layout})


def plan(job: Job, step: int, samples: StepSamples) -> StepPlan:
    """Plan one step.

    As many microbatches as the samples need. Where memory does not hold them, more and smaller ones, equally many on
    every rank; where it holds them but fewer at once than the schedule asks for, twice as many are compared with them,
    as long as plans by rules are faster. Only the number that is chosen is searched.

    Every step of a job that `limits.check_table` accepts has a plan: in the end every sample has a wave to itself, and
    with interleaved chunks so many waves without samples between it and the next that no two are in flight together.

    Images to understand require an encoder (`limits.check_table`).

    Raises:
        SampleTooLargeError: memory does not hold a sample, however many microbatches there are.
    """
    _check_tokens(job, samples)
    counts = Counts(job, step, samples)
    first = counts.first()
    fitting = counts.fitting(first)
    if not fitting.options:
        raise _too_large(job, samples, fitting.too_large, fitting.num_microbatches)
    best, options = fitting, list(fitting.options)
    finer = counts.finer(fitting) if fitting.is_short else None
    while finer is not None:
        options += _named(finer, finer.options)
        if not finer.options or finer.fastest_ns >= best.fastest_ns:
            break
        best, finer = finer, counts.finer(finer) if finer.is_short else None
    searched = best.searched(2 * first.num_sequences)
    options += searched if best is fitting else _named(best, searched)
    return _chosen(job, step, samples, options, first.num_microbatches, fitting.num_microbatches)


def _named(attempt: Attempt, options: Sequence[Option]) -> list[Option]:
    """The options of an attempt beside those of fewer microbatches."""
    return [replace(o, name=f"{o.name}, {attempt.num_microbatches} microbatches") for o in options]


def _chosen(job: Job, step: int, samples: StepSamples, options: list[Option], fewest: int, fitting: int) -> StepPlan:
    """The fastest of the plans, the first of several, with what was decided."""
    ranked = sorted(options, key=lambda o: o.makespan_ns)
    best = ranked[0]
    made = list(decisions(job.spec.execution, best.in_flight))
    number = best.plan.num_microbatches
    if number > fewest:
        reason = (
            f"memory does not hold those of {fewest}" if number == fitting else "memory holds more of them in flight"
        )
        made.append(Decision("step", f"{number} microbatches of each rank", reason))
    without = [o for o in ranked if not o.extra]
    extra = [o for o in ranked if o.extra]
    if without and extra:
        other = (without if best.extra else extra)[0]
        reason = f"simulated {milliseconds(best.makespan_ns)}, {milliseconds(other.makespan_ns)} with {other.extra}"
        made.append(Decision("step", f"{best.extra} extra in flight", reason))
    if len(ranked) > 1:
        last = ranked[-1]
        reason = f"simulated {milliseconds(best.makespan_ns)}; slowest of {len(ranked)} plans is {last.name}, "
        made.append(Decision("step", best.name, reason + milliseconds(last.makespan_ns)))
    plan = make_plan(
        job,
        step,
        samples,
        num_microbatches=number,
        sequences_per_microbatch=best.plan.sequences_per_microbatch,
        arrangements=best.plan.arrangements,
        routings=best.plan.routings,
        schedules=best.plan.schedules,
    )
    fastest = {o.plan.num_microbatches: o for o in reversed(ranked)}
    shown = [o for o in ranked if o.plan.num_microbatches == number or o is fastest[o.plan.num_microbatches]]
    candidates = tuple(Candidate(o.name, o.makespan_ns) for o in shown) if len(shown) > 1 else ()
    return replace(plan, candidates=candidates, decisions=tuple(made))


def _check_tokens(job: Job, samples: StepSamples) -> None:
    backbone = job.spec.execution.backbone
    limit = job.stream.seq_len if backbone.memory is None else min(backbone.memory.units, job.stream.seq_len)
    largest = int(samples.tokens.argmax()) if len(samples) else -1
    if largest >= 0 and samples.tokens[largest] > limit:
        raise SampleTooLargeError(
            f"{sample_name(job.stream, samples, largest)}: the sample has {samples.tokens[largest]} tokens, but a "
            f"microbatch of module {backbone.name} holds {limit} (the smaller of stream.seq_len and memory); raise "
            "memory.room_bytes, lower stream.seq_len, or leave such samples out with a filter or a quarantine list"
        )


def _too_large(job: Job, samples: StepSamples, module: ModuleSpec | None, count: int) -> SampleTooLargeError:
    """What to say where no number of microbatches helps: the largest sample of the module that lacked memory."""
    if module is None or module.memory is None:
        raise RuntimeError("a step has no plan although no module lacks memory")
    sizes = sample_sizes(job, samples, module)
    largest, backbone = int(sizes.argmax()), module.kind is ModuleKind.BACKBONE
    remedies = ["raise memory.room_bytes" if backbone else "raise memory.room_bytes or dp of the module"]
    if module.padded:
        remedies.append("switch padding off")
    remedies.append("leave such samples out with a filter or a quarantine list")
    item, held = "tokens" if backbone else "patches", "all that are planned, and padded," if module.padded else "all"
    return SampleTooLargeError(
        f"{sample_name(job.stream, samples, largest)}: the sample has {sizes[largest]} {item}, the most in module "
        f"{module.name}, and even in {count} microbatches its memory for {module.memory.units} on each of {module.dp} "
        f"ranks does not hold {held} that must be held at once; {', '.join(remedies[:-1])}, or {remedies[-1]}"
    )


def bound_ns(job: Job, plan: StepPlan, *, within_islands: bool = False) -> int:
    """A time that no plan of the same sequences can beat, or none whose images stay within islands of ranks."""
    sequence = sequence_of_samples(plan, job.spec.execution.backbone.name)
    in_flight = np.concatenate([plan.in_flight(m.name) for m in job.spec.execution.by_depth])
    problem = placement_problem(job.spec, in_flight, plan.samples, sequence, plan.num_microbatches)
    return lower_bound_ns(problem, within_islands=within_islands)
