"""What a colocated plan says of itself."""

from collections.abc import Sequence

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import ModuleKind, ModuleSpec
from dataserver.planning.job.spec import JobSpec
from dataserver.planning.layouts.colocated.assignment import as_numbered
from dataserver.planning.layouts.colocated.rounds import StepRounds
from dataserver.planning.layouts.interface import PlannedTimeline
from dataserver.planning.plan.expectation import held_units, microbatch_loads
from dataserver.planning.plan.naming import milliseconds, unit_of
from dataserver.planning.plan.plan import ArrangedStep, Decision


def decisions(
    spec: JobSpec,
    rounds: StepRounds,
    plan: ArrangedStep,
    planned: PlannedTimeline,
    fewest: int,
    fitting: tuple[int, int],
) -> tuple[Decision, ...]:
    """How every module was spread, what the assignment to ranks saved, and what memory asked for.

    The sequences alone would have taken `fewest` microbatches; `fitting` are the fewest that memory holds, and the
    nanoseconds of the step with these.
    """
    modules = spec.execution.modules
    return (
        *_of_memory(modules, rounds, plan, planned, fewest, fitting),
        *(_of_spread(m, rounds, plan) for m in modules),
        *_of_assignment(spec.execution.backbone.name, rounds),
    )


def _of_memory(
    modules: Sequence[ModuleSpec],
    rounds: StepRounds,
    plan: ArrangedStep,
    planned: PlannedTimeline,
    fewest: int,
    fitting: tuple[int, int],
) -> list[Decision]:
    said, several = list[Decision](), len(rounds.items) > 1
    limited = [m.name for m in modules if m.memory is not None]
    keeping = [m for m in modules if m.step_units is not None]
    if several:
        names, their = ", ".join(rounds.asked_by), "their" if len(rounds.asked_by) > 1 else "its"
        reason = f"in fewer, {names} would keep more than memory.step_bytes holds until {their} backward phase"
        said.append(Decision("step", f"{len(rounds.items)} rounds, one after the other", reason))
    if rounds.split_sequences:
        reason = "as packed, the images of some are more than a round holds"
        said.append(Decision("step", "sequences taken apart", reason))
    if plan.num_microbatches > fewest:
        reason = f"{fewest} hold the sequences, but not within the memory of {', '.join(limited)}"
        if plan.num_microbatches > fitting[0]:
            beside = f"{milliseconds(fitting[1])} with {fitting[0]}"
            reason = f"simulated {milliseconds(planned.makespan_ns)}, against {beside}"
        said.append(Decision("step", f"{plan.num_microbatches} microbatches of each rank", reason))
    if limited:
        peak = int(planned.timeline.peak_bytes.max())
        reason = "the most that a rank holds at once if nothing is computed again; budget_bytes bounds one microbatch"
        said.append(Decision("step", f"{peak // 10**6:,} MB of activations", reason))
    for module in keeping:
        kept = int(_of_rounds(held_units(module, plan), rounds).max())
        chosen = f"keeps {kept:,} {unit_of(module)} of {'a round' if several else 'the step'} on the fullest rank"
        reason = f"memory.step_bytes holds {module.step_units:,} until its backward phase"
        said.append(Decision(module.name, chosen, reason))
    return said


def _of_spread(module: ModuleSpec, rounds: StepRounds, plan: ArrangedStep) -> Decision:
    loads = _of_rounds(microbatch_loads(module, plan), rounds)
    own = module.name in rounds.arranged[0].at_home
    home = np.stack([r.at_home[module.name] for r in rounds.arranged], axis=1) if own else loads
    spread = f"largest / mean load of the ranks {_imbalance(loads):.3f}"
    if module.balance.keeps_order or not own:
        beside = module.kind is not ModuleKind.BACKBONE and not own
        chosen = "images beside their sequences" if beside else "canonical order"
    elif np.array_equal(np.sort(loads, axis=0), np.sort(home, axis=0)):
        chosen, spread = "canonical order", f"{spread}, and {module.balance.value} is no faster"
    else:
        spread += f", of the same sequences in canonical order {_imbalance(home):.3f}"
        chosen = module.balance.value
    return Decision(module.name, chosen, spread)


def _of_rounds(values: I64, rounds: StepRounds) -> I64:
    """Sum values of microbatches, int64 [ranks, microbatches], over each round: int64 [ranks, rounds]."""
    found: I64 = values.reshape(len(values), len(rounds.items), rounds.size).sum(axis=2)
    return found


def _imbalance(loads: I64) -> float:
    """Largest over mean load of the ranks in all rounds, since ranks meet in each; int64 [ranks, rounds]."""
    total = int(loads.sum())
    return 1.0 if total == 0 else int(loads.max(axis=0).sum()) * len(loads) / total


def _of_assignment(backbone: str, rounds: StepRounds) -> list[Decision]:
    """What the assignment of batches to ranks saved between each module and the backbone, in all rounds."""
    said = list[Decision]()
    for several in zip(*(r.exchanges for r in rounds.arranged), strict=True):
        first = several[0]
        numbered = as_numbered([first.source, first.target], len(first.node))
        moved, peak, moved_before, peak_before = 0, 0, 0, 0
        for exchange, of_round in zip(several, rounds.arranged, strict=True):
            moved += exchange.bytes_between_nodes(of_round.assigned)
            peak += exchange.peak(of_round.assigned)
            moved_before += exchange.bytes_between_nodes(numbered)
            peak_before += exchange.peak(numbered)
        module = first.source if first.target == backbone else first.target
        if (moved, peak) == (moved_before, peak_before):
            said.append(Decision(module, "batches as numbered", f"no byte saved: {moved // 1000:,} kB between nodes"))
            continue
        reason = f"{moved // 1000:,} kB between nodes, {moved_before // 1000:,} kB before"
        reason += f"; {peak // 1000:,} kB on the busiest node, {peak_before // 1000:,} before"
        said.append(Decision(module, "batches reassigned", reason))
    return said
