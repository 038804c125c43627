"""The colocated layout: all modules on all ranks, in phases."""

from dataserver.planning.job.fields import BalancePolicy
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.colocated.limits import ColocatedLimits
from dataserver.planning.layouts.colocated.options import ColocatedOptions
from dataserver.planning.layouts.colocated.planner import plan
from dataserver.planning.layouts.colocated.programs import programs
from dataserver.planning.layouts.colocated.timeline import bound_ns, timeline
from dataserver.planning.layouts.interface import Layout
from dataserver.planning.layouts.shared.ablation import (
    AblationEntry,
    canonical_modules,
    cumulative_ablation,
    images,
    memory,
    packing,
    sequences,
)
from dataserver.planning.layouts.shared.ablation_finalists import finalists
from dataserver.planning.layouts.shared.alternatives import (
    Alternatives,
    Dimension,
    Edit,
    balance_of,
    balances,
    edit_layout,
    edit_modules,
    microbatches,
    packings,
)
from dataserver.planning.layouts.shared.sequences import empty_percent, fill_percent
from dataserver.planning.plan.expectation import loads
from dataserver.planning.plan.plan import StepPlan


def _figures(own: Job, job: Job, plan: StepPlan) -> dict[str, float]:
    """Bytes are those between the nodes that the job itself has."""
    options = own.spec.execution.options(ColocatedOptions)
    size = options.ranks_per_node
    rows = (int(r.rows[r.source_rank // size != r.target_rank // size].sum()) for r in plan.routings)
    moved = {"between_nodes_bytes": options.row_bytes * sum(rows)}
    return fill_percent(job, plan) | empty_percent(job, plan) | moved


def ablation(job: Job) -> tuple[AblationEntry, ...]:
    """The baseline: best-fit packing, sequences in their order, images on the rank of theirs.

    As if memory were endless. Where all modules share their ranks, that is how any data-parallel trainer runs.
    """
    own = job.spec.execution
    baseline = own.model_copy(update={"modules": canonical_modules(job, images=BalancePolicy.NONE)})
    changes = *_evenly(job), *(change(job) for change in (packing, images, sequences, memory))
    return cumulative_ablation(job, "images beside their sequences", baseline, changes)


def _evenly(job: Job) -> list[tuple[str, Edit]]:
    """Equal counts of images first, where the job balances them."""
    spread = [m.name for m in job.spec.execution.modules if m.handles_images and not m.balance.keeps_order]
    return [("images dealt out evenly", edit_modules(spread, balance=BalancePolicy.EVEN))]


def alternatives(job: Job) -> Alternatives:
    """Packing and balance together; each balance, the size of microbatches, and ranks as if all shared a node, by
    themselves.

    With transfers a node more or less would be another network, on which no time can be compared.
    """
    execution = job.spec.execution
    single, ranks = [*map(balance_of, execution.modules), microbatches(job)], execution.backbone.dp
    if execution.options(ColocatedOptions).ranks_per_node < ranks and execution.transfers is None:
        single.append(Dimension("assignment to ranks", {"as balanced": edit_layout(ranks_per_node=ranks)}))
    return Alternatives([*packings(job), balances(execution)], single)


LAYOUT = Layout(
    plan=plan,
    ablation=ablation,
    finalists=lambda job: finalists(job, ablation(job)),
    programs=programs,
    timeline=timeline,
    lower_bound_ns=bound_ns,
    loads=loads,
    limits=ColocatedLimits,
    alternatives=alternatives,
    figures=_figures,
)
