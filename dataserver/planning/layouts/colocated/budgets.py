"""What the memory of ranks holds of a step at once (`jobspec.Memory.step_bytes`)."""

from dataserver.planning import I64
from dataserver.planning.balancing import BALANCERS, BinBudget, BinBudgetError, bin_loads, bin_totals
from dataserver.planning.job.fields import BalancePolicy
from dataserver.planning.layouts.colocated.items import ModuleItems
from dataserver.planning.plan.naming import counted, unit_of


class StepBudgetError(BinBudgetError):
    """Ranks would keep more than their memory holds, in however many microbatches."""

    def __init__(self, message: str, module: str) -> None:
        super().__init__(message)
        self.module = module
        """Name of the module whose memory is too small."""


def check_total(items: ModuleItems, rounds: int) -> None:
    """Refuse what all ranks together cannot keep, or images that no way was found to spread within memory.

    The items are those of one of so many rounds.

    Raises:
        StepBudgetError: names the module, what is needed and what there is.
    """
    module, budget, total = items.module, items.step_budget(items.sizes), int(items.sizes.sum())
    if budget is None or _spreads(items, budget):
        return
    together = module.dp * budget.cap
    problem = "" if total > together else ", and no way was found to spread them"
    raise StepBudgetError(
        f"module {module.name} keeps the {total} {unit_of(module)} of {_of(rounds)} until its backward phase, but "
        f"memory.step_bytes holds {budget.cap} on each of {counted(module.dp, 'rank')}, {together} together{problem}; "
        "raise memory.step_bytes or dp, take balanced packing, or leave such samples out",
        module.name,
    )


def check_sequences(items: ModuleItems) -> None:
    """Refuse sequences whose images, beside them, are more than a rank keeps: no number of rounds takes them apart.

    Raises:
        StepBudgetError: names the module, what is needed and what there is.
    """
    module, budget = items.module, items.step_budget(items.sizes)
    if budget is None or module.balance is not BalancePolicy.NONE:
        return
    most = int(bin_loads(items.sizes, items.sequence, int(items.sequence.max(initial=0)) + 1).max())
    if most > budget.cap:
        raise StepBudgetError(
            f"module {module.name}: the rank of a sequence would keep its {most} {unit_of(module)} until its backward "
            f"phase, but memory.step_bytes holds {budget.cap}; raise it, or take a balance other than none",
            module.name,
        )


def _of(rounds: int) -> str:
    return "this step" if rounds == 1 else f"one of {rounds} rounds"


def _spreads(items: ModuleItems, budget: BinBudget) -> bool:
    """Whether images fit; sequences may be packed in other ways, so that only their total counts."""
    if items.module.holds_samples:
        return int(budget.need.sum()) <= items.module.dp * budget.cap
    try:
        BALANCERS["lpt"](items.sizes, items.module.dp, None, budget)
    except BinBudgetError:
        return False
    return True


def check_ranks(items: ModuleItems, rank: I64, microbatch: I64, microbatches: int) -> None:
    """Refuse ranks that would keep more at once than their memory holds.

    Rank and microbatch of each of a module's k items are int64 [k]; there are `microbatches` of each rank.

    Raises:
        StepBudgetError: names the module, what is needed and what there is.
    """
    module, count = items.module, items.module.dp * microbatches
    held = bin_totals(items.sizes, rank * microbatches + microbatch, count, padded=module.padded)
    kept = held.reshape(module.dp, microbatches).sum(axis=1)
    budget = items.step_budget(kept)
    if budget is not None and kept.max() > budget.cap:
        raise StepBudgetError(
            f"module {module.name}: rank {kept.argmax()} would keep {kept.max()} {unit_of(module)} until its backward "
            f"phase, but memory.step_bytes holds {budget.cap}; raise it, or take a balance other than none",
            module.name,
        )
