"""Other ways to run a job: what `dataserver simulate` compares."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any, Final

from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.interface import layout_of

ABLATION: Final = "ablation"
"""Heading of what stands on the way from the baseline to the job, and nowhere else."""

ASKED_FOR: Final = ("modality_parity", "identity_routing")
"""What a trainer needs, whatever it costs."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to run a job."""

    heading: str
    """What varies among the alternatives of its group."""
    name: str
    """Its own choice of that."""
    execution: Execution


def alternatives_of(job: Job) -> list[Alternative]:
    """The job as it is; then all combinations of its main policies, the job with one thing changed, and its ablation.

    Every execution is there once.
    """
    own = job.spec.execution
    layout = layout_of(own)
    offered = layout.alternatives(job)
    heading = ", ".join(d.name for d in offered.main)
    found = [
        Alternative(heading, ", ".join(name for name, _ in picked), reduce(lambda e, p: p[1](e), picked, own))
        for picked in product(*(d.choices.items() for d in offered.main))
    ]
    same = next((a for a in found if a.execution == own), Alternative(heading, "as it is", own))
    found += [Alternative(d.name, name, edit(own)) for d in offered.single for name, edit in d.choices.items()]
    found += [Alternative(ABLATION, entry.name, entry.execution) for entry in layout.ablation(job)]
    unlike: dict[Execution, Alternative] = {own: same}
    for alternative in found:
        unlike.setdefault(alternative.execution, alternative)
    return list(unlike.values())


def changes(own: Execution, other: Execution) -> dict[str, Any]:
    """What to change in the `execution` of a job so that `own` becomes `other`; empty if they agree.

    Of modules the fields that differ, of the layout all that are not its defaults: it replaces the job's.
    """
    modules = [
        {"name": after.name, **fields}
        for before, after in zip(own.modules, other.modules, strict=True)
        if (fields := _different(before.model_dump(mode="json"), after.model_dump(mode="json")))
    ]
    found: dict[str, Any] = {"modules": modules} if modules else {}
    asked = (*ASKED_FOR, "microbatch")
    found |= {field: getattr(other, field) for field in asked if getattr(own, field) != getattr(other, field)}
    if own.layout == other.layout:
        return found
    layout = other.layout.model_dump(mode="json", exclude_defaults=True)
    return found | {"layout": {"kind": other.layout.kind, **layout}}


def _different(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _different(old[key], value) if isinstance(value, dict) and isinstance(old[key], dict) else value
        for key, value in new.items()
        if value != old[key]
    }
