"""Colocated layouts: every rank runs every module, one phase after the other (OrchMLLM, arXiv 2503.23830).

Since a module's phase runs alone over the whole step, waves do not apply (law 7): every phase has a balanced
arrangement of its own, and embeddings go from one arrangement to the next in one hop.

    items = module_items(spec, samples, sequence)
    phases = [module_phase(i, num_sequences, ranks, microbatches) for i in items]
    plan = arrange_phases([p.phase for p in phases], phase_links(phases, row_bytes), node)
"""

from dataserver.planning.phases.arrange import arrange_phases
from dataserver.planning.phases.interface import Link, Phase, PhaseArrangement, PhasePlan, PhaseRouting
from dataserver.planning.phases.microbatches import NoRoomError, fits, runs, split_ranks
from dataserver.planning.phases.steps import ModuleItems, ModulePhase, module_items, module_phase, phase_links

__all__ = [
    "Link",
    "ModuleItems",
    "ModulePhase",
    "NoRoomError",
    "Phase",
    "PhaseArrangement",
    "PhasePlan",
    "PhaseRouting",
    "arrange_phases",
    "fits",
    "module_items",
    "module_phase",
    "phase_links",
    "runs",
    "split_ranks",
]
