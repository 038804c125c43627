"""Other ways to run a job: what `dataserver simulate` compares."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any, Final

from dataserver.planning.identity import Job
from dataserver.planning.jobspec import (
    BalancePolicy,
    ColocatedLayout,
    ContrastiveLayout,
    ContrastiveSchedule,
    Execution,
    GroupPolicy,
    ModuleKind,
    ModuleSpec,
    OrderPolicy,
    PackingPolicy,
    PipelineLayout,
    Schedule,
)
from dataserver.planning.layouts import layout_planner

BASELINE: Final = "baseline"
"""Group of the job without any planning."""
EXTRA_IN_FLIGHT: Final = (0, 1, 2, 4)
CHUNKS: Final = 2
"""Model chunks of a stage that are tried with the interleaved schedule."""

Edit = Callable[[Execution], Execution]


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to run a job."""

    group: str
    """What varies among the alternatives that it stands with."""
    name: str
    """What it has of that."""
    execution: Execution


@dataclass(frozen=True, slots=True)
class _Dimension:
    """Something that can be chosen in a job, and its choices by name."""

    name: str
    choices: Mapping[str, Edit]


def alternatives_of(job: Job, milp: bool) -> list[Alternative]:
    """The job as it is; then all combinations of its main policies, the job with one thing changed, and the baseline.

    Every execution is there once.

    Args:
        job: the job.
        milp: whether the integer programme for sequence-parallel groups is tried, which takes seconds for each step.
    """
    own = job.spec.execution
    main = _main_dimensions(job, milp)
    heading = ", ".join(d.name for d in main)
    found = [
        Alternative(heading, ", ".join(name for name, _ in picked), reduce(lambda e, p: p[1](e), picked, own))
        for picked in product(*(d.choices.items() for d in main))
    ]
    same = next((a for a in found if a.execution == own), Alternative(heading, "as it is", own))
    found += [Alternative(d.name, name, edit(own)) for d in _other_dimensions(own) for name, edit in d.choices.items()]
    baseline = layout_planner(own).baseline(own)
    if own.of_kind(ModuleKind.BACKBONE) and not job.stream.packing.enabled:
        baseline = _backbone(packing=own.backbone.packing)(baseline)  # which decides nothing
    found.append(Alternative(BASELINE, "canonical order", baseline))
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


def _main_dimensions(job: Job, milp: bool) -> list[_Dimension]:
    """Those of which every combination is compared."""
    execution = job.spec.execution
    every = _Dimension(
        "balance",
        {p.value: _balance(p, [m.name for m in execution.modules]) for p in (BalancePolicy.LPT, BalancePolicy.NONE)},
    )
    if isinstance(execution.layout, ContrastiveLayout):
        return [_Dimension("schedule", {s.value: _contrastive(s) for s in ContrastiveSchedule}), every]
    packing = _Dimension("packing", {p.value: _backbone(packing=p) for p in PackingPolicy})
    dimensions = [packing] if job.stream.packing.enabled else []
    if execution.backbone.sequence_groups is not None:
        policies = [p for p in GroupPolicy if milp or p is not GroupPolicy.MILP]
        return [*dimensions, _Dimension("groups", {p.value: _grouped(p) for p in policies})]
    if isinstance(execution.layout, PipelineLayout):
        return [*dimensions, every, _order()]
    return [*dimensions, every]


def _other_dimensions(execution: Execution) -> list[_Dimension]:
    """Those that are varied one at a time."""
    layout = execution.layout
    found = [
        _Dimension(f"balance of {m.name}", {p.value: _balance(p, [m.name]) for p in BalancePolicy})
        for m in execution.modules
        if _has_choice(execution, m)
    ]
    extras = _Dimension("extra_in_flight", {str(n): _layout(extra_in_flight=n) for n in EXTRA_IN_FLIGHT})
    if isinstance(layout, PipelineLayout):
        alone = len(execution.modules) == 1
        if execution.backbone.sequence_groups is None:
            found.append(_Dimension("schedule", _schedules(layout, execution.backbone.pp)))
        elif not alone:
            found.append(_order())
        if layout.schedule is Schedule.ONE_F_ONE_B and not (alone and execution.backbone.pp == 1):
            found.append(extras)
    elif isinstance(layout, ColocatedLayout):
        if layout.ranks_per_node < execution.backbone.dp:
            one_node = {"as they are": _layout(ranks_per_node=execution.backbone.dp)}
            found.append(_Dimension("names of ranks", one_node))
    elif layout.schedule is ContrastiveSchedule.DISTMM_PIPE:
        found.append(extras)
    return found


def _has_choice(execution: Execution, module: ModuleSpec) -> bool:
    """Whether the balance of a module decides anything: not in groups, nor for a single rank that takes whole waves."""
    beside = module.kind is not ModuleKind.BACKBONE and isinstance(execution.layout, PipelineLayout)
    return module.sequence_groups is None and not (beside and module.dp == 1)


def _order() -> _Dimension:
    return _Dimension("order", {p.value: _layout(order=p) for p in OrderPolicy})


def _schedules(layout: PipelineLayout, stages: int) -> dict[str, Edit]:
    """The schedules that the job does not have."""
    found = {}
    for schedule in Schedule:
        if schedule is layout.schedule or (schedule is Schedule.INTERLEAVED and stages == 1):
            continue
        chunks = CHUNKS if schedule is Schedule.INTERLEAVED else 1
        name = f"{schedule}, {chunks} chunks" if chunks > 1 else schedule.value
        found[name] = _layout(schedule=schedule, chunks=chunks, extra_in_flight=None)
    return found


def _layout(**values: Any) -> Edit:
    return lambda e: e.model_copy(update={"layout": e.layout.model_copy(update=values)})


def _contrastive(schedule: ContrastiveSchedule) -> Edit:
    if schedule is ContrastiveSchedule.BATCH_SYNC:
        return _layout(schedule=schedule, extra_in_flight=0)
    return _layout(schedule=schedule)


def _balance(policy: BalancePolicy, names: Sequence[str]) -> Edit:
    return lambda e: _edited(e, names, {"balance": policy})


def _backbone(**values: Any) -> Edit:
    return lambda e: _edited(e, [e.backbone.name], values)


def _grouped(policy: GroupPolicy) -> Edit:
    def edit(execution: Execution) -> Execution:
        groups = execution.backbone.sequence_groups
        assert groups is not None
        return _backbone(sequence_groups=groups.model_copy(update={"policy": policy}))(execution)

    return edit


def _edited(execution: Execution, names: Iterable[str], values: Mapping[str, Any]) -> Execution:
    chosen = set(names)
    modules: tuple[ModuleSpec, ...] = tuple(
        m.model_copy(update=values) if m.name in chosen else m for m in execution.modules
    )
    return execution.model_copy(update={"modules": modules})
