"""Colocated layouts: every rank runs every module, one phase after the other (OrchMLLM, arXiv 2503.23830).

Since a module's phase runs alone over the whole step, waves do not apply (law 7): every phase has a balanced
arrangement of its own, and embeddings go from one arrangement to the next in one hop.

    phases, links = colocated_phases(spec, samples, row_bytes)   # further encoders: append a Phase and a Link
    plan = arrange_phases(phases, links, node)
"""

from dataserver.planning.phases.arrange import arrange_phases
from dataserver.planning.phases.interface import Link, Phase, PhaseArrangement, PhasePlan, PhaseRouting
from dataserver.planning.phases.steps import PhaseOptions, colocated_phases

__all__ = [
    "Link",
    "Phase",
    "PhaseArrangement",
    "PhaseOptions",
    "PhasePlan",
    "PhaseRouting",
    "arrange_phases",
    "colocated_phases",
]
