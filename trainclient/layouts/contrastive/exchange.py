"""Rows of a contrastive job move by messages from stage to stage; all last stages interact."""

from collections.abc import Sequence
from dataclasses import replace

from trainclient.layouts.contrastive.feature_gathering import FeatureGathering
from trainclient.layouts.contrastive.interaction import ContrastiveInteraction
from trainclient.layouts.interface import ChunkEnds, ProcessSurroundings
from trainclient.layouts.shared.messages import chunk_ends as message_ends
from trainclient.modules import TrainedModule


def chunk_ends(surroundings: ProcessSurroundings, modules: Sequence[TrainedModule]) -> list[ChunkEnds]:
    """The ends of the chunks of a process."""
    ends, communicators = message_ends(surroundings, modules), surroundings.communicators
    if communicators.collective is None:
        return ends
    (ranks,) = surroundings.topology.collectives
    towers = [surroundings.topology.processes[rank].chunks[-1].module.name for rank in ranks]
    interaction = ContrastiveInteraction(
        surroundings.spec,
        FeatureGathering(communicators.collective, ranks, towers),
        surroundings.clock,
        surroundings.observe,
    )
    return [*ends[:-1], replace(ends[-1], interaction=interaction, buffers=(interaction,))]
