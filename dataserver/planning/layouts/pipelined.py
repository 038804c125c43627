"""Encoders, backbone stages and generators on devices of their own, wave by wave (DistTrain, arXiv 2408.04275)."""

from dataclasses import replace

import numpy as np

from dataserver.planning.arranging import module_images
from dataserver.planning.identity import Job
from dataserver.planning.jobspec import (
    Execution,
    ModuleKind,
    ModuleSpec,
    OrderPolicy,
    PackingPolicy,
    Schedule,
)
from dataserver.planning.layouts.attempts import Attempt, Option
from dataserver.planning.layouts.canonical import canonical_modules
from dataserver.planning.layouts.in_flight import decisions
from dataserver.planning.layouts.interface import LayoutPlanner
from dataserver.planning.layouts.joined import pipeline_layout, pipeline_modules, timeline
from dataserver.planning.naming import milliseconds, sample_name
from dataserver.planning.packing import one_per_sequence
from dataserver.planning.placing import lower_bound_ns, placement_problem
from dataserver.planning.plan import Candidate, Decision, StepPlan, make_plan
from dataserver.planning.samples import I64, StepSamples
from dataserver.planning.sequences import pack_step
from dataserver.planning.sizing import SampleTooLargeError


def baseline(execution: Execution) -> Execution:
    """Best-fit packing, canonical order, images beside their backbone rank, as if memory were endless."""
    layout = pipeline_layout(execution).model_copy(update={"order": OrderPolicy.NONE})
    return execution.model_copy(update={"modules": canonical_modules(execution), "layout": layout})


def plan(job: Job, step: int, samples: StepSamples) -> StepPlan:
    """Plan one step.

    As many microbatches as the samples need. Where memory does not hold them, more and smaller ones, equally many on
    every rank; where it holds them but fewer at once than the schedule asks for, twice as many are compared with them,
    as long as that is faster.

    Images to understand require an encoder (`limits.check_table`).

    Raises:
        SampleTooLargeError: memory does not hold a sample, however many microbatches there are.
    """
    _check_tokens(job, samples)
    sequence, count = _packed(job, samples, _fewest(job, samples))
    fewest, most = count, max(count, len(samples))
    attempt = Attempt(job, step, samples, sequence, count)
    options = attempt.options()
    while not options and count < most:
        sequence, count = _packed(job, samples, min(most, count + max(1, count // 4)))
        attempt = Attempt(job, step, samples, sequence, count)
        options = attempt.options()
    if not options:  # every sample can have a wave to itself now, and fits one
        attempt = Attempt(job, step, samples, one_per_sequence(samples.tokens), count)
        options = attempt.options()
    if not options:
        raise _too_large(job, samples, attempt.too_large, count)
    fitting = count
    latest = options
    while any(o.in_flight.is_short for o in latest if not o.extra) and count < _splittable(job, samples, sequence):
        fastest = min(o.makespan_ns for o in options)
        sequence, count = _packed(job, samples, 2 * count)
        latest = Attempt(job, step, samples, sequence, count).options()
        options += [replace(o, name=f"{o.name}, {count} microbatches") for o in latest]
        if min(o.makespan_ns for o in options) == fastest:
            break
    return _chosen(job, step, samples, options, fewest, fitting)


def _packed(job: Job, samples: StepSamples, at_least: int) -> tuple[I64, int]:
    """The sequence of each sample, and the number of microbatches: a multiple of the stages for interleaved chunks."""
    sequence, count = pack_step(job, samples, at_least)
    stages = job.spec.execution.backbone.pp
    if pipeline_layout(job.spec.execution).schedule is Schedule.INTERLEAVED and count % stages:
        return pack_step(job, samples, -(-count // stages) * stages)
    return sequence, count


def _splittable(job: Job, samples: StepSamples, sequence: I64) -> int:
    """Microbatches that hold one sequence each, or one sample each where packing fills all sequences there are."""
    backbone = job.spec.execution.backbone
    spread = job.stream.packing.enabled and backbone.packing is PackingPolicy.BALANCED
    return -(-(len(samples) if spread else int(sequence.max(initial=-1)) + 1) // backbone.dp)


def _fewest(job: Job, samples: StepSamples) -> int:
    """Microbatches without which the memory of some module could not hold all items."""
    fewest = 1
    for module in job.spec.execution.modules:
        if module.memory is not None:
            total = int(_sizes(job, samples, module).sum())
            fewest = max(fewest, -(-total // (module.memory.units * module.dp)))
    return fewest


def _sizes(job: Job, samples: StepSamples, module: ModuleSpec) -> I64:
    """Tokens or patches of each sample in a module. int64 [n]."""
    if module.kind is ModuleKind.BACKBONE:
        return samples.tokens
    images, sizes = module_images(job.spec, module, samples), np.zeros(len(samples), np.int64)
    np.add.at(sizes, samples.image_sample[images], samples.patches[images])
    return sizes


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
    sizes = _sizes(job, samples, module)
    largest, backbone = int(sizes.argmax()), module.kind is ModuleKind.BACKBONE
    layout = pipeline_layout(job.spec.execution)
    remedies = ["raise memory.room_bytes" if backbone else "raise memory.room_bytes or dp of the module"]
    if layout.schedule is Schedule.INTERLEAVED:
        remedies.append("choose schedule 1f1b, which holds fewer microbatches at once")
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
    backbone = plan.arrangement(job.spec.execution.backbone.name)
    place = (backbone.rank * plan.num_microbatches + backbone.microbatch) * plan.sequences_per_microbatch
    _, of_item = np.unique(place + backbone.slot, return_inverse=True)
    sequence = np.empty(len(place), np.int64)
    sequence[backbone.item] = of_item
    in_flight = np.concatenate([plan.in_flight(m.name) for m in pipeline_modules(job.spec.execution)])
    problem = placement_problem(job.spec, in_flight, plan.samples, sequence, plan.num_microbatches)
    return lower_bound_ns(problem, within_islands=within_islands)


PLANNER = LayoutPlanner(plan, baseline, timeline, bound_ns)
