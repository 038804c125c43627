"""The part of a job that belongs to the colocated layout."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from dataserver.planning.job.fields import (
    BackboneOptions,
    ExecutionParts,
    Extreme,
    ModuleKind,
    ModuleSpec,
    Natural,
    Stream,
)


class ColocatedOptions(BackboneOptions):
    """Every rank runs every module, one phase after the other, each with an arrangement of its own (OrchMLLM).

    The `memory` of a module limits each of its microbatches. Encoders (and, before generators, the backbone) hold
    activations of all their microbatches until their backward phase. `step_bytes` limits these: a larger step is cut
    into rounds of all phases. Without `step_bytes`, recompute them, or leave room for them in `budget_bytes`.
    """

    kind: Literal["colocated"]
    """Selects the colocated layout."""
    ranks_per_node: Annotated[int, Field(ge=1, le=65536)] = 8
    """Consecutive ranks of a node; batches are assigned to ranks so that few bytes leave their node. With `dp` or more
    there is one node, and no assignment saves anything."""
    row_bytes: Natural = 8192
    """Bytes of one embedding or condition between phases: the backbone's width x bytes of a number."""

    def check_modules(self, execution: ExecutionParts) -> None:
        """Refuse modules of different degrees, or in stages."""
        super().check_modules(execution)
        degrees = {m.name: (m.dp, m.tp, m.sp, m.pp) for m in execution.modules}
        if len(set(degrees.values())) > 1 or execution.modules[0].pp > 1:
            raise ValueError(
                f"modules have (dp, tp, sp, pp) {degrees}; colocated modules need the same degrees and pp 1, since "
                "every rank runs them all"
            )

    def step_size(self, stream: Stream, execution: ExecutionParts) -> dict[str, int]:
        """Bytes are counted between every two ranks."""
        pairs = (len(execution.modules) - 1) * execution.modules[0].dp ** 2
        return {**super().step_size(stream, execution), "rank_pairs": pairs}

    def extremes(self, stream: Stream, execution: ExecutionParts) -> Iterable[Extreme]:
        """All rows move between nodes."""
        rows = 2 * stream.global_batch * stream.seq_len * len(execution.modules)
        yield Extreme("bytes between ranks", 16 * rows * self.row_bytes, "lower layout.row_bytes")

    def keeps_step(self, execution: ExecutionParts, module: ModuleSpec) -> bool:
        """Modules with phases of others between forward and backward; a frozen one has no backward to keep it for."""
        apart = {ModuleKind.ENCODER}
        if execution.of_kind(ModuleKind.GENERATOR):
            apart.add(ModuleKind.BACKBONE)
        return module.kind in apart and module.cost.backward_percent > 0
