"""The pipelined layout: modules on ranks of their own, in stages."""

from dataserver.planning.job.fields import BalancePolicy, ModuleKind, Schedule
from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.interface import Layout
from dataserver.planning.layouts.pipelined.options import PipelinedOptions
from dataserver.planning.layouts.pipelined.planner import bound_ns, plan
from dataserver.planning.layouts.pipelined.programs import programs
from dataserver.planning.layouts.pipelined.timeline import timeline
from dataserver.planning.layouts.shared.ablation import (
    AblationEntry,
    canonical_modules,
    cumulative_ablation,
    images,
    in_flight,
    memory,
    order,
    packing,
    parity,
    sequences,
    strict,
)
from dataserver.planning.layouts.shared.ablation_finalists import finalists
from dataserver.planning.layouts.shared.alternatives import (
    Alternatives,
    Dimension,
    balance_of,
    edit_layout,
    edit_modules,
    extras,
    microbatches,
    orders,
    packings,
    wave_balances,
    without,
)
from dataserver.planning.layouts.shared.limits import BackboneLimits
from dataserver.planning.layouts.shared.sequences import empty_percent, fill_percent
from dataserver.planning.plan.expectation import loads

CHUNKS = (2, 4, 8)
"""Model chunks of a stage that are tried with the interleaved schedule."""


def ablation(job: Job) -> tuple[AblationEntry, ...]:
    """The baseline: best-fit packing, canonical order, the images of every wave dealt out evenly over all ranks.

    Where images stay on the ranks of their sequences, they do so here, too. As if memory were endless. The schedule and
    its model chunks are the job's.
    """
    own = job.spec.execution
    spread = BalancePolicy.NONE if own.identity_routing else BalancePolicy.EVEN
    plain = {"modules": canonical_modules(job, spread), "modality_parity": None}
    baseline = strict(own)(own.model_copy(update=plain))
    changes = (packing, images, sequences, memory, order, in_flight, parity)
    return cumulative_ablation(job, "canonical order", baseline, (change(job) for change in changes))


def _finalists(job: Job) -> tuple[AblationEntry, ...]:
    """Those with another packing; all where memory or parity may ask for more microbatches.

    Otherwise sequences in canonical order, images dealt out evenly and Algorithm 2 are among the plan's candidates.
    """
    execution = job.spec.execution
    limited = execution.modality_parity or any(m.memory is not None for m in execution.modules)
    if not limited and not job.stream.packing.enabled:
        return ()
    found, own = finalists(job, ablation(job)), execution.backbone.packing
    return found if limited else tuple(e for e in found if e.execution.backbone.packing is not own)


def alternatives(job: Job) -> Alternatives:
    """Packing, balance and order together; on their own each balance, the schedule, the size of microbatches, and what
    is in flight."""
    execution = job.spec.execution
    layout, backbone = execution.options(PipelinedOptions), execution.backbone
    single = [
        balance_of(m)
        for m in execution.modules
        if m.kind is ModuleKind.BACKBONE or (m.dp > 1 and not execution.identity_routing)  # others take whole waves
    ]
    single += [_schedules(layout, backbone.pp), microbatches(job)]
    alone = len(execution.modules) == 1 and backbone.pp == 1
    if layout.schedule is Schedule.ONE_F_ONE_B and not alone:
        single.append(extras())
    single += [without(field) for field in ("modality_parity", "identity_routing") if getattr(execution, field)]
    return Alternatives([*packings(job), _balances(execution), orders()], single)


def _balances(execution: Execution) -> Dimension:
    """One balance for all modules, of images only where they have a choice."""
    if not execution.identity_routing:
        return wave_balances(execution)
    policies = BalancePolicy.LPT, BalancePolicy.NONE
    return Dimension("balance", {p.value: edit_modules([execution.backbone.name], balance=p) for p in policies})


def _schedules(layout: PipelinedOptions, stages: int) -> Dimension:
    """The schedules that the job does not have, interleaved with several numbers of chunks."""
    others = [s for s in Schedule if s not in (layout.schedule, Schedule.INTERLEAVED)]
    found = {s.value: edit_layout(schedule=s, chunks=1, extra_in_flight=None) for s in others}
    for chunks in CHUNKS if stages > 1 else ():
        edit = edit_layout(schedule=Schedule.INTERLEAVED, chunks=chunks, extra_in_flight=None)
        found[f"{Schedule.INTERLEAVED}, {chunks} chunks"] = edit
    return Dimension("schedule", found)


LAYOUT = Layout(
    plan=plan,
    ablation=ablation,
    finalists=_finalists,
    programs=programs,
    timeline=timeline,
    lower_bound_ns=bound_ns,
    loads=loads,
    limits=BackboneLimits,
    alternatives=alternatives,
    figures=lambda _own, job, plan: fill_percent(job, plan) | empty_percent(job, plan),
)
