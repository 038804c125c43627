"""How large a step may be: constants of the plan version, so that every plan takes bounded time and memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The most that one plan version takes. A job beyond a limit is refused, by its name, when it is created."""

    step_sequences: int
    """Largest `stream.global_batch` that is planned."""
    step_samples: int
    """Samples of a step, on average over an epoch; a single step has at most four times as many."""
    step_images: int
    """Images of a step; the same."""
    step_microbatches: int
    """Microbatches of each rank. Where memory asks for more, none of them are tried."""
    step_operations: int
    """Forwards and backwards that are simulated: 2 x microbatches x model chunks x stages x ranks, over all modules."""
    step_passes: int
    """Ways of sequences through pipelines, which a search goes by: `stream.global_batch` x (stages of the backbone +
    encoders + generators)."""
    rank_pairs: int
    """Colocated: pairs of ranks between which bytes are counted, ranks^2 for each encoder and generator."""
    group_sequences: int
    """Largest `stream.global_batch` of the grouped layout."""
    component_work: int
    """Where an encoder or generator states its memory: `stream.global_batch` x the backbone ranks of a component (`dp`
    over the greatest common divisor of all modules' `dp`), which share that memory."""
    integer: int
    """Nanoseconds, bytes, or products of them, that could come together in one step: they are added in int64."""


_LIMITS: Final = PlanLimits(
    step_sequences=1 << 17,
    step_samples=1 << 17,
    step_images=1 << 18,
    step_microbatches=1 << 14,
    step_operations=1 << 21,
    step_passes=1 << 20,
    rank_pairs=1 << 24,
    group_sequences=1 << 13,
    component_work=1 << 27,
    integer=1 << 62,
)
PLAN_LIMITS: Final[Mapping[int, PlanLimits]] = MappingProxyType(dict.fromkeys((5, 6, 7, 8), _LIMITS))
"""The limits of each plan version."""

SINGLE_STEP: Final = 4
"""A single step may have so many times the samples and images of the average."""
REMEDIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "step_sequences": "lower stream.global_batch",
        "step_microbatches": "lower stream.global_batch, or raise dp of the backbone or execution.microbatch",
        "step_operations": "lower stream.global_batch, dp or pp, or raise execution.microbatch",
        "step_passes": "lower stream.global_batch or pp of the backbone",
        "rank_pairs": "lower dp",
        "group_sequences": "lower stream.global_batch",
        "component_work": "lower stream.global_batch, leave memory out, or take degrees with a larger common divisor",
    }
)
"""What to change where a job is beyond a limit that its specification alone decides."""


@dataclass(frozen=True, slots=True)
class Extreme:
    """The largest that a sum or product of planning could become, whatever a step holds."""

    what: str
    value: int
    remedy: str = ""
    """What to change; by default costs."""
