"""Modules without any planning, as the baselines of all layouts have them."""

from dataserver.planning.jobspec import BalancePolicy, Execution, ModuleKind, ModuleSpec, PackingPolicy


def canonical_modules(execution: Execution) -> tuple[ModuleSpec, ...]:
    """The same modules with best-fit packing, items as they come, and endless memory.

    Items as they come need more memory than planned ones: a baseline that kept to it could not run every step that was
    planned. Only sequence groups keep theirs, since it says what a device of a group takes.
    """
    return tuple(
        m.model_copy(
            update={
                "balance": BalancePolicy.NONE,
                "packing": PackingPolicy.BEST_FIT if m.kind is ModuleKind.BACKBONE else None,
                "memory": m.memory if m.sequence_groups is not None else None,
            }
        )
        for m in execution.modules
    )
