"""From canonical order to the job as it is, one named change at a time: what brings how much."""

from collections.abc import Iterable
from dataclasses import dataclass

from dataserver.planning.job.fields import (
    BalancePolicy,
    ModuleKind,
    ModuleSpec,
    OrderPolicy,
    PackingPolicy,
    WaveOptions,
)
from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.shared.alternatives import Edit, edit_layout
from dataserver.planning.layouts.shared.waves import extras


@dataclass(frozen=True, slots=True)
class AblationEntry:
    """One way to run a job: that of the entry before, and one more thing as in the job."""

    name: str
    """What is new, for people; of the first, what it is."""
    execution: Execution


def cumulative_ablation(
    job: Job, name: str, baseline: Execution, changes: Iterable[tuple[str, Edit]]
) -> tuple[AblationEntry, ...]:
    """The ablation from a baseline to a job.

    Args:
        job: the last entry.
        name: of the baseline, less how it packs.
        baseline: the first.
        changes: to take over from the job, in this order, each with a name. Those that change nothing are left out.

    Raises:
        ValueError: the changes do not lead to the job.
    """
    found = [AblationEntry(f"best fit, {name}" if job.stream.packing.enabled else name, baseline)]
    for title, edit in changes:
        execution = edit(found[-1].execution)
        if execution != found[-1].execution:
            found.append(AblationEntry(title, execution))
    if found[-1].execution != job.spec.execution:
        raise ValueError(f"the ablation of a {job.spec.execution.layout.kind} layout does not end at its job")
    return tuple(found)


def canonical_modules(job: Job, images: BalancePolicy = BalancePolicy.EVEN) -> tuple[ModuleSpec, ...]:
    """The modules of a job with best-fit packing, items as they come, and endless memory, for baselines.

    Items as they come need more memory than planned ones: a baseline that kept to it could not run every step that was
    planned.

    Args:
        job: whose modules.
        images: the balance of encoders and generators.
    """
    packs = job.stream.packing.enabled  # where nothing is packed, packing decides nothing
    return tuple(
        m.model_copy(
            update={
                "balance": images if m.handles_images else BalancePolicy.NONE,
                "packing": PackingPolicy.BEST_FIT if packs and m.kind is ModuleKind.BACKBONE else m.packing,
                "memory": None,
            }
        )
        for m in job.spec.execution.modules
    )


def packing(job: Job) -> tuple[str, Edit]:
    """Samples share sequences as in the job."""
    policies = [m.packing.replace("_", " ") for m in job.spec.execution.modules if m.packing]
    return f"{', '.join(policies)} packing", _as_in(job, "packing")


def images(job: Job) -> tuple[str, Edit]:
    """Images get ranks as in the job."""
    beside = all(m.balance is BalancePolicy.NONE for m in job.spec.execution.modules if m.handles_images)
    title = "images beside their sequences" if beside else "images spread over ranks"
    return title, _as_in(job, "balance", ModuleKind.ENCODER, ModuleKind.GENERATOR)


def sequences(job: Job) -> tuple[str, Edit]:
    """Sequences get ranks as in the job."""
    return "sequences spread over ranks", _as_in(job, "balance", ModuleKind.BACKBONE)


def pairs(job: Job) -> tuple[str, Edit]:
    """The items of towers get ranks and microbatches as in the job."""
    return "pairs spread over ranks", _as_in(job, "balance", ModuleKind.TOWER)


def memory(job: Job) -> tuple[str, Edit]:
    """Memory holds as much as in the job."""
    return "within memory", _as_in(job, "memory")


def order(job: Job) -> tuple[str, Edit]:
    """Microbatches stand in the job's order; of layouts that work wave by wave."""
    policy = job.spec.execution.options(WaveOptions).order
    return "order searched" if policy is OrderPolicy.SEARCH else "Algorithm 2", edit_layout(order=policy)


def in_flight(job: Job) -> tuple[str, Edit]:
    """Have as many microbatches in flight as the job has, in layouts that work wave by wave."""
    extra = job.spec.execution.options(WaveOptions).extra_in_flight
    return f"up to {extras(job.spec.execution)[-1]} more in flight", edit_layout(extra_in_flight=extra)


def parity(job: Job) -> tuple[str, Edit]:
    """All ranks of a wave have images, or none, if the job asks for it."""
    asked = job.spec.execution.modality_parity
    return "images on all ranks or none", lambda e: e.model_copy(update={"modality_parity": asked})


def strict(execution: Execution) -> Edit:
    """Microbatches as they come, and no more in flight than the job itself asks for, whatever its memory holds."""
    extra = execution.options(WaveOptions).extra_in_flight
    automatic = extra is None and len(extras(execution)) > 1
    return edit_layout(order=OrderPolicy.NONE, extra_in_flight=0 if automatic else extra)


def _as_in(job: Job, field: str, *kinds: ModuleKind) -> Edit:
    """A field of the modules of some kinds, or of all, as in the job."""
    own = {m.name: getattr(m, field) for m in job.spec.execution.modules if not kinds or m.kind in kinds}

    def edit(execution: Execution) -> Execution:
        modules = [m.model_copy(update={field: own[m.name]}) if m.name in own else m for m in execution.modules]
        return execution.model_copy(update={"modules": tuple(modules)})

    return edit
