"""Every rank runs every module, one phase after the other, each arranged for itself (OrchMLLM, arXiv 2503.23830)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dataserver.planning.arranging import arrange_and_route, arrange_samples, images_beside, module_images
from dataserver.planning.balancing import BALANCERS, Balancer
from dataserver.planning.colocated.arranging import arrange_phases
from dataserver.planning.colocated.items import ModuleItems, ModulePhase, module_items, module_phase, phase_links
from dataserver.planning.colocated.microbatches import NoRoomError, fits, runs, split_ranks
from dataserver.planning.colocated.options import ColocatedOptions
from dataserver.planning.colocated.phases import PhasePlan, PhaseRouting
from dataserver.planning.colocated.programs import schedules
from dataserver.planning.colocated.rooms import check_ranks, check_total, unit_of
from dataserver.planning.colocated.timeline import timeline
from dataserver.planning.expectation import held_units, imbalance, microbatch_loads
from dataserver.planning.identity import Job
from dataserver.planning.job import Execution, JobSpec
from dataserver.planning.jobspec import BalancePolicy, ModuleKind
from dataserver.planning.layout import canonical_modules
from dataserver.planning.naming import sample_name
from dataserver.planning.placement import in_order
from dataserver.planning.plan import Arrangement, Candidate, Decision, Routing, StepPlan, make_plan
from dataserver.planning.samples import I64, StepSamples
from dataserver.planning.sequences import pack_step
from dataserver.planning.sizing import SampleTooLargeError


@dataclass(frozen=True, slots=True)
class _Spread:
    """Rank and microbatch of each item of a module. int64 [k] each."""

    rank: I64
    microbatch: I64


@dataclass(frozen=True, slots=True)
class _Arranged:
    """What was found for the items of a step."""

    phases: Sequence[ModulePhase]
    """Of the modules with an arrangement of their own."""
    plan: PhasePlan
    spreads: Mapping[str, _Spread]
    """Of all modules."""


def baseline(execution: Execution) -> Execution:
    """The sampling layout: best-fit packing, sequences in their order, every image on the rank of its sequence.

    As if memory were endless.
    """
    return execution.model_copy(update={"modules": canonical_modules(execution)})


def plan(job: Job, step: int, samples: StepSamples) -> StepPlan:
    """Plan one step.

    Raises:
        SampleTooLargeError: the memory of a module does not hold a sample; names it and the limit.
        NoRoomError: the memory of a module does not hold the step, however it is spread.
    """
    _check_room(job.spec, samples)
    sequence, fewest = pack_step(job, samples)
    items = module_items(job.spec, samples, sequence)
    for found in items:
        check_total(found)
    microbatches = max(fewest, *(_fewest_microbatches(i) for i in items))
    while True:
        if microbatches > fewest:  # there are more slots to pack into
            sequence, _ = pack_step(job, samples, microbatches)
            items = module_items(job.spec, samples, sequence)
        try:
            arranged = _arrange(job.spec.execution, items, microbatches)
            break
        except NoRoomError:
            if microbatches > max(len(i.index) for i in items):  # every item had a microbatch for itself
                raise
            microbatches += max(1, microbatches // 8)
    options = {"balanced": arranged}
    if job.spec.execution.transfers is not None:
        options |= _staying(job.spec.execution, items, microbatches)
    plans = {n: _assemble(job, step, samples, sequence, microbatches, items, o.spreads) for n, o in options.items()}
    ranked = _ranked(job.spec, plans) if len(plans) > 1 else ()
    best = ranked[0].name if ranked else "balanced"
    decided = _decisions(job.spec, plans[best], options[best], fewest)
    return replace(plans[best], candidates=ranked, decisions=decided)


def _ranked(spec: JobSpec, plans: Mapping[str, StepPlan]) -> tuple[Candidate, ...]:
    """Some plans as simulated, fastest first."""
    candidates = [Candidate(name, timeline(spec, found).makespan_ns) for name, found in plans.items()]
    return tuple(sorted(candidates, key=lambda c: c.makespan_ns))


def _staying(execution: Execution, items: Sequence[ModuleItems], microbatches: int) -> dict[str, _Arranged]:
    """Every image on the rank of its sequence, so that no hop moves a row; nothing where memory does not hold that."""
    none = {"balance": BalancePolicy.NONE}
    kept = [i if i.slots is not None else replace(i, module=i.module.model_copy(update=none)) for i in items]
    try:
        return {"images beside their sequences": _arrange(execution, kept, microbatches)}
    except NoRoomError:
        return {}


def _check_room(spec: JobSpec, samples: StepSamples) -> None:
    """Refuse a sample or image that the memory of a module does not hold even alone."""
    for module in spec.execution.modules:
        if module.kind is ModuleKind.BACKBONE:
            sizes, sample, unit = samples.tokens, np.arange(len(samples)), "tokens"
        else:
            images = module_images(spec, module, samples)
            sizes, sample, unit = samples.patches[images], samples.image_sample[images], "patches of an image"
        if module.memory is None or sizes.max(initial=0) <= module.memory.units:
            continue
        i = int(sample[sizes.argmax()])
        raise SampleTooLargeError(
            f"{sample_name(spec.stream, samples, i)}: {sizes.max()} {unit}, but the memory of module {module.name} "
            f"holds {module.memory.units}; raise its room_bytes, or leave such samples out"
        )


def _fewest_microbatches(items: ModuleItems) -> int:
    """With fewer microbatches of each rank the memory of a module cannot hold its items."""
    memory = items.memory()
    return 1 if memory is None else -(-int(items.sizes.sum()) // (items.module.dp * memory.cap))


def _arrange(execution: Execution, items: Sequence[ModuleItems], microbatches: int) -> _Arranged:
    """Spread the items of every module.

    Raises:
        NoRoomError: the memory of a module does not hold them in so many microbatches.
    """
    layout, ranks = execution.options(ColocatedOptions), execution.backbone.dp
    backbone = next(i for i in items if i.module.kind is ModuleKind.BACKBONE)
    free = [i for i in items if i is backbone or i.module.balance is not BalancePolicy.NONE]
    try:
        phases = [module_phase(i, len(backbone.index), ranks, microbatches) for i in free]
        links = phase_links(phases, layout.row_bytes)
        found = arrange_phases([p.phase for p in phases], links, np.arange(ranks) // layout.ranks_per_node)
        spreads = {p.phase.name: _within_ranks(p, found, ranks, microbatches) for p in phases}
        for module in items:
            if module not in free:
                spreads[module.module.name] = _beside(module, spreads[backbone.module.name], ranks, microbatches)
        for module in items:
            spread = spreads[module.module.name]
            check_ranks(module, spread.rank, spread.microbatch, microbatches)
    except ValueError as error:
        if all(i.memory() is None for i in items):
            raise
        raise NoRoomError(str(error)) from error
    return _Arranged(phases, found, spreads)


def _within_ranks(phase: ModulePhase, found: PhasePlan, ranks: int, microbatches: int) -> _Spread:
    items, places = phase.items, found.arrangement(phase.phase.name).places
    rank = places.rank[phase.unit]
    if items.module.padded:  # what was spread are microbatches
        return _Spread(rank, places.position[phase.unit])
    return _Spread(rank, _split(items, rank, ranks, microbatches))


def _beside(items: ModuleItems, backbone: _Spread, ranks: int, microbatches: int) -> _Spread:
    """Every image on the rank of its sequence."""
    rank = backbone.rank[items.sequence]
    spread = _Spread(rank, _split(items, rank, ranks, microbatches))
    place = rank * microbatches + spread.microbatch
    if not fits(items.sizes, place, ranks * microbatches, items.memory(), padded=items.module.padded):
        raise NoRoomError(f"module {items.module.name}: the images beside their sequences exceed its memory")
    return spread


def _split(items: ModuleItems, rank: I64, ranks: int, microbatches: int) -> I64:
    """The microbatch of each item within its rank."""
    policy = items.module.balance
    balancer: Balancer = runs if policy is BalancePolicy.NONE else BALANCERS[policy.value]
    return split_ranks(balancer, items.loads, rank, ranks, microbatches, items.slots, items.memory())


def _assemble(
    job: Job,
    step: int,
    samples: StepSamples,
    sequence: I64,
    microbatches: int,
    items: Sequence[ModuleItems],
    spreads: Mapping[str, _Spread],
) -> StepPlan:
    execution = job.spec.execution
    spread = spreads[execution.backbone.name]
    placement = in_order(spread.rank, spread.microbatch, microbatches)
    backbone = arrange_samples(execution.backbone, samples, sequence, placement)
    arrangements: dict[str, Arrangement] = {backbone.module: backbone}
    routings: list[Routing] = []
    for found in items:
        if found.slots is not None:
            continue
        beside = images_beside(job.spec, found.module, samples, backbone)
        at = np.searchsorted(found.index, beside.image)
        spread = spreads[found.module.name]
        arrangement, routing = arrange_and_route(found.module, backbone, beside, spread.rank[at], spread.microbatch[at])
        arrangements[arrangement.module] = arrangement
        routings.append(routing)
    return make_plan(
        job,
        step,
        samples,
        num_microbatches=microbatches,
        sequences_per_microbatch=execution.microbatch,
        arrangements=tuple(arrangements[m.name] for m in execution.modules),
        routings=tuple(routings),
        schedules=schedules(execution, microbatches),
    )


def _decisions(spec: JobSpec, found: StepPlan, arranged: _Arranged, fewest: int) -> tuple[Decision, ...]:
    """How every module was spread, what the names of the ranks saved, and what memory asked for."""
    said = []
    limited = [m.name for m in spec.execution.modules if m.memory is not None]
    if found.num_microbatches > fewest:
        reason = f"{fewest} hold the sequences, but not within the memory of {', '.join(limited)}"
        said.append(Decision("step", f"{found.num_microbatches} microbatches of each rank", reason))
    if limited:
        peak = int(timeline(spec, found).timeline.peak_bytes.max())
        reason = "the most that a rank holds at once if nothing is computed again; memory bounds single microbatches"
        said.append(Decision("step", f"{peak // 10**6:,} MB of activations", reason))
    for module in spec.execution.modules:
        room = None if module.memory is None else module.memory.step_units
        if room is not None:
            kept = int(held_units(module, found).sum(axis=1).max())
            chosen = f"keeps {kept:,} {unit_of(module)} of the step on the fullest rank"
            said.append(Decision(module.name, chosen, f"memory.step_bytes holds {room:,} until its backward phase"))
    homes = {p.phase.name: p.home_loads for p in arranged.phases}
    for module in spec.execution.modules:
        loads = microbatch_loads(module, found).sum(axis=1)
        home = homes.get(module.name, loads)
        spread = f"largest / mean load of the ranks {imbalance(loads.tolist()):.3f}"
        if module.balance is BalancePolicy.NONE or module.name not in homes:
            chosen = "canonical order" if module.kind is ModuleKind.BACKBONE else "images beside their sequences"
        elif np.array_equal(np.sort(loads), np.sort(home)):
            chosen, spread = "canonical order", f"{spread}, and {module.balance.value} is no faster"
        else:
            spread += f", of the same sequences in canonical order {imbalance(home.tolist()):.3f}"
            chosen = module.balance.value
        said.append(Decision(module.name, chosen, spread))
    return (*said, *(_named(spec, routing) for routing in arranged.plan.routings))


def _named(spec: JobSpec, found: PhaseRouting) -> Decision:
    """What new names of the ranks saved between a module and the backbone."""
    ends = found.routing.source_module, found.routing.target_module
    now, before = (f"{count // 1000:,} kB" for count in (found.bytes_between_nodes, found.identity_bytes))
    peak, same_peak = (f"{count // 1000:,}" for count in (found.peak_bytes, found.identity_peak_bytes))
    module = next(name for name in ends if name != spec.execution.backbone.name)
    if (found.bytes_between_nodes, found.peak_bytes) == (found.identity_bytes, found.identity_peak_bytes):
        return Decision(module, "kept identity", f"no byte saved: {now} between nodes")
    reason = f"{now} between nodes, {before} before; {peak} kB on the busiest node, {same_peak} before"
    return Decision(module, "ranks named anew", reason)
