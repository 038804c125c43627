"""Every rank runs every module, one phase after the other, each arranged for itself (OrchMLLM, arXiv 2503.23830)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from dataserver.planning.balancing import BinBudgetError, bin_loads
from dataserver.planning.job.fields import BalancePolicy, ModuleKind
from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import Execution, JobSpec
from dataserver.planning.layouts.colocated.decisions import decisions
from dataserver.planning.layouts.colocated.items import ModuleItems
from dataserver.planning.layouts.colocated.limits import most_retained, over_step_memory
from dataserver.planning.layouts.colocated.programs import schedules
from dataserver.planning.layouts.colocated.rounds import StepRounds, arrange_step
from dataserver.planning.layouts.colocated.timeline import bound_ns, timeline
from dataserver.planning.layouts.interface import PlannedTimeline
from dataserver.planning.layouts.shared.candidates import fastest, ranked, shown
from dataserver.planning.plan.arranging import arrange_and_route, arrange_samples, images_beside, module_images
from dataserver.planning.plan.naming import sample_name
from dataserver.planning.plan.placement import in_order
from dataserver.planning.plan.plan import ArrangedStep, Arrangement, Candidate, Routing, StepPlan, make_plan
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.sizing import MicrobatchTooLargeError, SampleTooLargeError

MORE_SINCE = 8
"""The first plan_version that also tries more microbatches than memory asks for, where it states any."""


@dataclass(frozen=True, slots=True)
class _CandidatePlan:
    """One of the plans that are compared."""

    name: str
    rounds: StepRounds
    plan: ArrangedStep
    planned: PlannedTimeline

    @property
    def makespan_ns(self) -> int:
        """Simulated time of the step."""
        return self.planned.makespan_ns


def plan(job: Job, step: int, samples: StepSamples) -> StepPlan:
    """Plan one step.

    Raises:
        SampleTooLargeError: the memory of a module does not hold a sample; names it and the limit.
        BinBudgetError: no way was found to fit the memory of a module, however many rounds and microbatches.
    """
    _check_budget(job.spec, samples)
    arranged, fewest = arrange_step(job, samples)
    fitting, *others = _candidates(job, samples, arranged)
    best, compared = fitting, [_in_short(c) for c in (fitting, *others)]
    if job.spec.execution.plan_version >= MORE_SINCE:
        for found in _with_more_microbatches(job, samples, fitting):
            best = fastest([best, found])
            compared.append(_in_short(found))
    fits = fitting.rounds.num_microbatches, fitting.makespan_ns
    said = decisions(job.spec, best.rounds, best.plan, best.planned, fewest, fits)
    return replace(make_plan(job, step, best.plan), candidates=shown(ranked(compared)), decisions=said)


def _in_short(found: _CandidatePlan) -> Candidate:
    """What a plan shows of one that was compared: of many numbers of microbatches the others are not held whole."""
    return Candidate(found.name, found.makespan_ns)


def _candidates(job: Job, samples: StepSamples, rounds: StepRounds, number: int | None = None) -> list[_CandidatePlan]:
    """The plans of these rounds, fastest first; named after a number of microbatches, if one was asked for."""
    options = {"balanced": rounds}
    if job.spec.execution.transfers is not None:
        options |= _staying(job.spec.execution, rounds)
    more = "" if number is None else f", {rounds.num_microbatches} microbatches"
    return ranked(_candidate(job, f"{name}{more}", samples, found) for name, found in options.items())


def _with_more_microbatches(job: Job, samples: StepSamples, fewest: _CandidatePlan) -> Iterator[_CandidatePlan]:
    """The step as less memory would run it, in more and smaller microbatches, as long as these are faster.

    What ranks hold depends on their number, most of all in canonical order. Where no memory is stated, there are always
    as many as the samples need; and where a plan is near its bound there is nothing to win.
    """
    if all(m.memory is None for m in job.spec.execution.modules):
        return
    best_ns, bound, number = fewest.makespan_ns, bound_ns(job, fewest.plan), fewest.rounds.num_microbatches
    while number < len(samples) and 20 * best_ns > 21 * bound:
        number += max(1, number // 8)
        try:
            rounds, _ = arrange_step(job, samples, number)
        except (BinBudgetError, MicrobatchTooLargeError):  # too many, or no way was found to fit them
            return
        found = _candidates(job, samples, rounds, number)
        yield from found
        if found[0].makespan_ns >= best_ns:
            return
        best_ns, bound, number = found[0].makespan_ns, bound_ns(job, found[0].plan), rounds.num_microbatches


def _staying(execution: Execution, rounds: StepRounds) -> dict[str, StepRounds]:
    """Every image on the rank of its sequence, so that no transfer moves a row; nothing where memory is short."""
    none = {"balance": BalancePolicy.NONE}

    def beside(items: ModuleItems) -> ModuleItems:
        return items if items.module.holds_samples else replace(items, module=items.module.model_copy(update=none))

    try:
        return {"images beside their sequences": rounds.rearranged(execution, beside)}
    except BinBudgetError:
        return {}


def _check_budget(spec: JobSpec, samples: StepSamples) -> None:
    """Refuse a sample or image that the memory of a module does not hold even alone."""
    for module in spec.execution.modules:
        if module.memory is None:
            continue
        if module.kind is ModuleKind.BACKBONE:
            sizes, sample, unit = samples.tokens, np.arange(len(samples)), "tokens"
        else:
            images = module_images(spec, module, samples)
            sizes, sample, unit = samples.patches[images], samples.image_sample[images], "patches of an image"
        if sizes.max(initial=0) > module.memory.units:
            i = int(sample[sizes.argmax()])
            raise SampleTooLargeError(
                f"{sample_name(spec.stream, samples, i)}: {sizes.max()} {unit}, but the memory of module {module.name} "
                f"holds {module.memory.units}; raise its budget_bytes, or leave such samples out"
            )
        together, kept = bin_loads(sizes, sample, len(samples)), most_retained(module)
        if kept is not None and not module.holds_samples and together.max(initial=0) > kept:
            i = int(together.argmax())
            raise SampleTooLargeError(
                over_step_memory(module, sample_name(spec.stream, samples, i), sizes[sample == i])
            )


def _candidate(job: Job, name: str, samples: StepSamples, rounds: StepRounds) -> _CandidatePlan:
    """The arrangements with their routings, simulated."""
    execution = job.spec.execution
    _, *places = rounds.places(execution.backbone.name)
    placement = in_order(places[0], places[1], rounds.num_microbatches)
    backbone = arrange_samples(execution.backbone, samples, rounds.sequence, placement)
    arrangements: dict[str, Arrangement] = {backbone.module: backbone}
    routings: list[Routing] = []
    for module in execution.modules:
        if module.kind is ModuleKind.BACKBONE:
            continue
        beside = images_beside(job.spec, module, samples, backbone)
        index, rank, microbatch = rounds.places(module.name)
        at_index = np.searchsorted(index, beside.image)
        found = arrange_and_route(module, backbone, beside, rank[at_index], microbatch[at_index])
        arrangements[module.name] = found[0]
        routings.append(found[1])
    whole = ArrangedStep(
        samples=samples,
        num_microbatches=rounds.num_microbatches,
        sequences_per_microbatch=execution.microbatch,
        arrangements=tuple(arrangements[m.name] for m in execution.modules),
        routings=tuple(routings),
        schedules=schedules(execution, rounds.num_microbatches, rounds.size),
    )
    return _CandidatePlan(name, rounds, whole, timeline(job.spec, whole))
