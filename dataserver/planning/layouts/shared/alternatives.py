"""Other ways to run a job, as each layout names them for a comparison."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataserver.planning.job.fields import BalancePolicy, ModuleSpec, OrderPolicy, PackingPolicy
from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import Execution

Edit = Callable[[Execution], Execution]
"""Derives an execution from another."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """Something that can be chosen in a job, and its choices by name."""

    name: str
    choices: Mapping[str, Edit]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """What `dataserver simulate` compares with a job."""

    main: Sequence[Dimension]
    """All combinations of the choices of these."""
    single: Sequence[Dimension]
    """The job as it is with one choice of one of these."""


EXTRA_IN_FLIGHT = (0, 1, 2, 4)


MICROBATCHES = (1, 2, 4, 8)
"""Sequences of a microbatch that are tried, where they divide the batch."""


def edit_layout(**values: Any) -> Edit:
    """Other options of the layout."""
    return lambda e: e.model_copy(update={"layout": e.layout.model_copy(update=values)})


def edit_modules(names: Iterable[str], **values: Any) -> Edit:
    """Other fields of some modules."""
    chosen = set(names)

    def edit(execution: Execution) -> Execution:
        modules = tuple(m.model_copy(update=values) if m.name in chosen else m for m in execution.modules)
        return execution.model_copy(update={"modules": modules})

    return edit


def without(field: str) -> Dimension:
    """The job without something that it asks for."""
    return Dimension(field, {"not asked for": lambda e: e.model_copy(update={field: None})})


def balances(execution: Execution) -> Dimension:
    """One balance for all modules, or canonical order."""
    names = [m.name for m in execution.modules]
    policies = BalancePolicy.LPT, BalancePolicy.NONE
    return Dimension("balance", {p.value: edit_modules(names, balance=p) for p in policies})


def wave_balances(execution: Execution) -> Dimension:
    """One balance for all modules, or canonical order with equal counts; of layouts that work wave by wave."""
    lpt, _ = balances(execution).choices.items()
    images = edit_modules([m.name for m in execution.modules if m.handles_images], balance=BalancePolicy.EVEN)
    others = edit_modules([m.name for m in execution.modules if not m.handles_images], balance=BalancePolicy.NONE)
    return Dimension("balance", dict([lpt, ("even", lambda e: images(others(e)))]))


def balance_of(module: ModuleSpec) -> Dimension:
    """The balance of one module."""
    policies = [p for p in BalancePolicy if p is not BalancePolicy.EVEN or module.handles_images]
    choices = {p.value: edit_modules([module.name], balance=p) for p in policies}
    return Dimension(f"balance of {module.name}", choices)


def packings(job: Job) -> list[Dimension]:
    """How the backbone packs, if the stream does."""
    if not job.stream.packing.enabled:
        return []
    name = job.spec.execution.backbone.name
    return [Dimension("packing", {p.value: edit_modules([name], packing=p) for p in PackingPolicy})]


def orders() -> Dimension:
    """The order of a rank's microbatches."""
    return Dimension("order", {p.value: edit_layout(order=p) for p in OrderPolicy})


def microbatches(job: Job) -> Dimension:
    """Sequences of a microbatch: more of them in fewer waves, which stages then hold longer."""
    batch, ranks = job.stream.global_batch, job.spec.execution.backbone.dp

    def edit(number: int) -> Edit:
        return lambda e: e.model_copy(update={"microbatch": number})

    return Dimension("microbatch", {str(m): edit(m) for m in MICROBATCHES if batch % (ranks * m) == 0})


def extras() -> Dimension:
    """Microbatches in flight beyond those of the schedule."""
    return Dimension("extra_in_flight", {str(n): edit_layout(extra_in_flight=n) for n in EXTRA_IN_FLIGHT})
