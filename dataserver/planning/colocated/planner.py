"""Every rank runs every module, one phase after the other, each arranged for itself (OrchMLLM, arXiv 2503.23830)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dataserver.planning.arranging import arrange_and_route, arrange_samples, images_beside, module_images
from dataserver.planning.balancing import BinRoomError, traffic_between
from dataserver.planning.candidates import ranked, shown
from dataserver.planning.colocated.assignment import Assignment, Exchange, as_numbered, assign_batches
from dataserver.planning.colocated.items import ModuleItems, module_items
from dataserver.planning.colocated.options import ColocatedOptions
from dataserver.planning.colocated.programs import schedules
from dataserver.planning.colocated.rooms import check_ranks, check_total
from dataserver.planning.colocated.spreading import Spread, spread_beside, spread_items
from dataserver.planning.colocated.timeline import timeline
from dataserver.planning.expectation import held_units, imbalance, microbatch_loads
from dataserver.planning.identity import Job
from dataserver.planning.job import Execution, JobSpec
from dataserver.planning.jobspec import BalancePolicy, ModuleKind
from dataserver.planning.layout import PlannedTimeline
from dataserver.planning.naming import sample_name, unit_of
from dataserver.planning.pacing import pace
from dataserver.planning.placement import in_order
from dataserver.planning.plan import ArrangedStep, Arrangement, Decision, Routing, StepPlan, make_plan
from dataserver.planning.plan_limits import check_microbatches
from dataserver.planning.samples import I64, StepSamples
from dataserver.planning.sequences import pack_step
from dataserver.planning.sizing import SampleTooLargeError


@dataclass(frozen=True, slots=True)
class _Arranged:
    """What was found for the items of a step."""

    spreads: Mapping[str, Spread]
    """Of all modules."""
    at_home: Mapping[str, I64]
    """Of the modules with an arrangement of their own int64 [ranks]: nanoseconds where every item is on the rank of its
    sequence."""
    exchanges: Sequence[Exchange]
    """Between the backbone and the others of those."""
    assigned: Assignment
    """Of all modules; images beside their sequences go where the backbone's batches go."""

    def places(self, module: str) -> tuple[I64, I64]:
        """Rank and microbatch of each item of a module. int64 [k] each."""
        return self.assigned[module][self.spreads[module].batch], self.spreads[module].microbatch


@dataclass(frozen=True, slots=True)
class _CandidatePlan:
    """One of the plans that are compared."""

    name: str
    arranged: _Arranged
    plan: ArrangedStep
    planned: PlannedTimeline

    @property
    def makespan_ns(self) -> int:
        """As simulated."""
        return self.planned.makespan_ns


def plan(job: Job, step: int, samples: StepSamples) -> StepPlan:
    """Plan one step.

    Raises:
        SampleTooLargeError: the memory of a module does not hold a sample; names it and the limit.
        BinRoomError: no way was found to fit the memory of a module, however many microbatches.
    """
    _check_room(job.spec, samples)
    sequence, fewest = pack_step(job, samples)
    items = module_items(job.spec, samples, sequence)
    for found in items:
        check_total(found)
    microbatches = max(fewest, *(_fewest_microbatches(i) for i in items))
    while True:
        check_microbatches(job.spec.execution, microbatches)
        if microbatches > fewest:  # there are more slots to pack into
            sequence, _ = pack_step(job, samples, microbatches)
            items = module_items(job.spec, samples, sequence)
        try:
            arranged = _arrange(job.spec.execution, items, microbatches)
            break
        except BinRoomError:
            if microbatches > max(len(i.index) for i in items):  # every item had a microbatch for itself
                raise
            microbatches += max(1, microbatches // 8)
    options = {"balanced": arranged}
    if job.spec.execution.transfers is not None:
        options |= _staying(job.spec.execution, items, microbatches)
    candidates = ranked(
        _candidate(job, name, samples, sequence, microbatches, items, option) for name, option in options.items()
    )
    best = candidates[0]
    said = _decisions(job.spec, best, fewest)
    return replace(make_plan(job, step, best.plan), candidates=shown(candidates), decisions=said)


def _staying(execution: Execution, items: Sequence[ModuleItems], microbatches: int) -> dict[str, _Arranged]:
    """Every image on the rank of its sequence, so that no hop moves a row; nothing where memory does not hold that."""
    none = {"balance": BalancePolicy.NONE}
    kept = [i if i.slots is not None else replace(i, module=i.module.model_copy(update=none)) for i in items]
    try:
        return {"images beside their sequences": _arrange(execution, kept, microbatches)}
    except BinRoomError:
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
    room = items.room()
    return 1 if room is None else -(-int(items.sizes.sum()) // (items.module.dp * room.cap))


def _arrange(execution: Execution, items: Sequence[ModuleItems], microbatches: int) -> _Arranged:
    """Spread the items of every module, each for itself, and assign the batches to ranks.

    Raises:
        BinRoomError: the memory of a module does not hold them in so many microbatches.
    """
    ranks, name = execution.backbone.dp, execution.backbone.name
    by_name = {i.module.name: i for i in items}
    own = [n for n, i in by_name.items() if n == name or i.module.balance is not BalancePolicy.NONE]
    spreads, at_home = {}, {}
    for module in own:
        spreads[module], at_home[module] = spread_items(by_name[module], len(by_name[name].index), microbatches)
    exchanges = [_exchange(execution, by_name[m], spreads[m], spreads[name]) for m in own if m != name]
    assigned = assign_batches(as_numbered(own, ranks), exchanges)
    for module in [m for m in by_name if m not in own]:
        spreads[module] = spread_beside(by_name[module], spreads[name], microbatches)
        assigned[module] = assigned[name]
        check_ranks(by_name[module], assigned[module][spreads[module].batch], spreads[module].microbatch, microbatches)
    return _Arranged(spreads, at_home, exchanges, assigned)


def _exchange(execution: Execution, items: ModuleItems, spread: Spread, backbone: Spread) -> Exchange:
    """What the batches of an encoder hand to those of the backbone, or these to those of a generator."""
    layout, ranks, module = execution.options(ColocatedOptions), execution.backbone.dp, items.module
    ends = [(module.name, spread.batch), (execution.backbone.name, backbone.batch[items.sequence])]
    (source, first), (target, then) = ends if module.kind is ModuleKind.ENCODER else reversed(ends)
    pace()
    traffic = traffic_between(first, then, items.rows * layout.row_bytes, ranks, ranks)
    return Exchange(source, target, traffic, np.arange(ranks) // layout.ranks_per_node)


def _candidate(
    job: Job,
    name: str,
    samples: StepSamples,
    sequence: I64,
    microbatches: int,
    items: Sequence[ModuleItems],
    arranged: _Arranged,
) -> _CandidatePlan:
    """The arrangements with their routings, simulated."""
    execution = job.spec.execution
    placement = in_order(*arranged.places(execution.backbone.name), microbatches)
    backbone = arrange_samples(execution.backbone, samples, sequence, placement)
    arrangements: dict[str, Arrangement] = {backbone.module: backbone}
    routings: list[Routing] = []
    for found in items:
        if found.slots is not None:
            continue
        beside = images_beside(job.spec, found.module, samples, backbone)
        at = np.searchsorted(found.index, beside.image)
        rank, microbatch = arranged.places(found.module.name)
        arrangement, routing = arrange_and_route(found.module, backbone, beside, rank[at], microbatch[at])
        arrangements[arrangement.module] = arrangement
        routings.append(routing)
    whole = ArrangedStep(
        samples=samples,
        num_microbatches=microbatches,
        sequences_per_microbatch=execution.microbatch,
        arrangements=tuple(arrangements[m.name] for m in execution.modules),
        routings=tuple(routings),
        schedules=schedules(execution, microbatches),
    )
    return _CandidatePlan(name, arranged, whole, timeline(job.spec, whole))


def _decisions(spec: JobSpec, best: _CandidatePlan, fewest: int) -> tuple[Decision, ...]:
    """How every module was spread, what the assignment to ranks saved, and what memory asked for."""
    said, execution, found, arranged = list[Decision](), spec.execution, best.plan, best.arranged
    limited = [m.name for m in execution.modules if m.memory is not None]
    if found.num_microbatches > fewest:
        reason = f"{fewest} hold the sequences, but not within the memory of {', '.join(limited)}"
        said.append(Decision("step", f"{found.num_microbatches} microbatches of each rank", reason))
    if limited:
        peak = int(best.planned.timeline.peak_bytes.max())
        reason = "the most that a rank holds at once if nothing is computed again; room_bytes bounds one microbatch"
        said.append(Decision("step", f"{peak // 10**6:,} MB of activations", reason))
    for module in execution.modules:
        room = None if module.memory is None else module.memory.step_units
        if room is not None:
            kept = int(held_units(module, found).sum(axis=1).max())
            chosen = f"keeps {kept:,} {unit_of(module)} of the step on the fullest rank"
            said.append(Decision(module.name, chosen, f"memory.step_bytes holds {room:,} until its backward phase"))
    for module in execution.modules:
        loads = microbatch_loads(module, found).sum(axis=1)
        home = arranged.at_home.get(module.name, loads)
        spread = f"largest / mean load of the ranks {imbalance(loads.tolist()):.3f}"
        if module.balance.keeps_order or module.name not in arranged.at_home:
            beside = module.kind is not ModuleKind.BACKBONE and module.name not in arranged.at_home
            chosen = "images beside their sequences" if beside else "canonical order"
        elif np.array_equal(np.sort(loads), np.sort(home)):
            chosen, spread = "canonical order", f"{spread}, and {module.balance.value} is no faster"
        else:
            spread += f", of the same sequences in canonical order {imbalance(home.tolist()):.3f}"
            chosen = module.balance.value
        said.append(Decision(module.name, chosen, spread))
    return (*said, *(_assigned(execution.backbone.name, e, arranged.assigned) for e in arranged.exchanges))


def _assigned(backbone: str, exchange: Exchange, assigned: Assignment) -> Decision:
    """What the assignment of batches to ranks saved between a module and the backbone."""
    numbered = as_numbered([exchange.source, exchange.target], len(exchange.node))
    moved, peak = exchange.bytes_between_nodes(assigned), exchange.peak(assigned)
    moved_before, peak_before = exchange.bytes_between_nodes(numbered), exchange.peak(numbered)
    module = exchange.source if exchange.target == backbone else exchange.target
    if (moved, peak) == (moved_before, peak_before):
        return Decision(module, "batches as numbered", f"no byte saved: {moved // 1000:,} kB between nodes")
    reason = f"{moved // 1000:,} kB between nodes, {moved_before // 1000:,} kB before"
    reason += f"; {peak // 1000:,} kB on the busiest node, {peak_before // 1000:,} before"
    return Decision(module, "batches reassigned", reason)
