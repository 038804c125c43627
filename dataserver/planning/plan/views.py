"""Views: what one (module, rank) gets of a microbatch, cut from the plan. Shapes and bytes only, no content."""

from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import Modality, ModuleKind
from dataserver.planning.job.spec import JobSpec
from dataserver.planning.plan.parity import has_parity
from dataserver.planning.plan.plan import Routing, StepPlan

ALIGNMENT: Final = 64
"""Every tensor of a view begins at a multiple of this many bytes."""


def aligned(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


_ARRAYS: Final = tuple(field.name for field in fields(Routing) if not field.name.endswith("_module"))


@dataclass(frozen=True, slots=True, eq=False)
class ViewPlan:
    """What a view will hold."""

    module: str
    kind: ModuleKind
    holds_samples: bool
    """Whether items are samples (backbone, text tower) rather than images."""
    rank: int
    microbatch: int
    items: I64
    """int64 [k]: indices into the step's samples or images, in the order of the view."""
    slots: I64
    """int64 [k]: sequence slot of each sample (backbone); positions elsewhere."""
    starts: I64
    """int64 [k]: first token, embedding, condition or patch of each item (`plan.Arrangement`)."""
    routings: tuple[Routing, ...]
    """The entries of this microbatch that leave or reach this rank."""
    images_on_some_ranks: bool
    """Whether the job asks for modality parity, and this microbatch has none."""
    reads: Modality = Modality.IMAGE
    """What items are, where they are no samples."""

    @property
    def num_items(self) -> int:
        """Number of samples or images."""
        return len(self.items)


def view_plan(spec: JobSpec, plan: StepPlan, module: str, rank: int, microbatch: int) -> ViewPlan:
    """The view of one rank's microbatch.

    Raises:
        ValueError: the module, rank or microbatch is not in the plan.
    """
    found = spec.execution.module(module)
    if not 0 <= rank < found.dp:
        raise ValueError(f"rank {rank} of module {module} does not exist; its dp is {found.dp}")
    if not 0 <= microbatch < plan.num_microbatches:
        raise ValueError(f"microbatch {microbatch} does not exist; step {plan.step} has {plan.num_microbatches}")
    arrangement = plan.arrangement(module)
    holder = plan.groups.holder(module, rank, microbatch)
    here = arrangement.of(holder, microbatch)
    return ViewPlan(
        module=module,
        kind=found.kind,
        holds_samples=found.holds_samples,
        rank=rank,
        microbatch=microbatch,
        items=arrangement.item[here],
        slots=arrangement.slot[here],
        starts=arrangement.start[here],
        routings=tuple(
            _of_rank(r, module, holder, microbatch)
            for r in plan.routings
            if module in (r.source_module, r.target_module)
        ),
        images_on_some_ranks=bool(spec.execution.modality_parity) and not has_parity(spec.execution, plan, microbatch),
        reads=found.reads,
    )


def _of_rank(routing: Routing, module: str, rank: int, microbatch: int) -> Routing:
    """The entries of one microbatch that concern one rank."""
    side = "source" if routing.source_module == module else "target"
    ranks, microbatches = getattr(routing, f"{side}_rank"), getattr(routing, f"{side}_microbatch")
    picked = np.flatnonzero((microbatches == microbatch) & (ranks == rank))
    return Routing(routing.source_module, routing.target_module, *(getattr(routing, f)[picked] for f in _ARRAYS))
