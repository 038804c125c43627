"""Which modules of a job run a backward, and what it costs where some are frozen or compute activations again."""

from collections.abc import Sequence
from typing import Final

from dataserver.planning.job.fields.hardware import backward_percent
from dataserver.planning.job.fields.modules import ModuleSpec
from dataserver.planning.job.fields.values import ModuleKind

_BEFORE: Final = {
    ModuleKind.ENCODER: (),
    ModuleKind.BACKBONE: (ModuleKind.ENCODER,),
    ModuleKind.GENERATOR: (ModuleKind.ENCODER, ModuleKind.BACKBONE),
    ModuleKind.TOWER: (),
}
"""Kinds of modules whose rows reach those of a kind."""


def with_backwards(modules: tuple[ModuleSpec, ...]) -> tuple[ModuleSpec, ...]:
    """The modules of a job, with the backwards that those run which are frozen or compute activations again.

    The gradient of a module's inputs takes about as long as its forward, and that of its weights as long again. A
    frozen module computes the first alone, for trained modules before it, and none where all of these are frozen too.
    Computing activations again takes another forward.

    Raises:
        ValueError: a cost contradicts what a frozen module does, or there is no backward that could compute anything
            again.
    """
    return tuple(_settled(m, modules) if m.frozen or m.recompute else m for m in modules)


def gradient_passes(module: ModuleSpec, modules: Sequence[ModuleSpec]) -> int:
    """How many of two gradients its backward computes: of its weights, and of its inputs for what is trained before."""
    return int(bool(_trained_before(module, modules))) if module.frozen else 2


def without_backwards(modules: Sequence[ModuleSpec]) -> tuple[ModuleSpec, ...]:
    """The same modules with all of them frozen: forwards alone, as an evaluation runs them."""
    return tuple(_forward_only(m) for m in modules)


def _forward_only(module: ModuleSpec) -> ModuleSpec:
    cost = module.cost.model_copy(update={"backward_percent": 0})
    memory = module.memory and module.memory.model_copy(update={"step_bytes": None})  # nothing is kept for a backward
    return module.model_copy(update={"frozen": True, "recompute": None, "cost": cost, "memory": memory})


def _trained_before(module: ModuleSpec, modules: Sequence[ModuleSpec]) -> list[str]:
    return [m.name for m in modules if m.kind in _BEFORE[module.kind] and not m.frozen]


def _settled(module: ModuleSpec, modules: Sequence[ModuleSpec]) -> ModuleSpec:
    """A module whose cost is what it does."""
    trained = _trained_before(module, modules)
    frozen, again = bool(module.frozen), bool(module.recompute)
    if again and frozen and not trained:
        raise ValueError(
            f"module {module.name} is frozen and nothing before it is trained, so it runs no backward that could "
            "compute anything again; leave recompute out"
        )
    if "backward_percent" not in module.cost.model_fields_set:
        percent = backward_percent(frozen=frozen, input_gradient=bool(trained), checkpoint=again)
        return module.model_copy(update={"cost": module.cost.model_copy(update={"backward_percent": percent})})
    given = module.cost.backward_percent
    if not frozen:
        return module
    if given and not trained:
        raise ValueError(
            f"module {module.name} is frozen and nothing before it is trained, so it runs no backward, but its "
            f"cost.backward_percent is {given}; leave it out, or set it to 0"
        )
    if trained and not given:
        raise ValueError(
            f"module {module.name} is frozen and hands gradients on to {' and '.join(trained)}, but its "
            "cost.backward_percent is 0; leave it out, or give the share of the forward's time that this takes"
        )
    return module
