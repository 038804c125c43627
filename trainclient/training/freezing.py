"""What a run does not train: modules that the job freezes, and towers of encoders whose projector is trained alone."""

from collections.abc import Sequence
from typing import Final

from torch import nn

from dataserver.planning.job.fields import ModuleSpec
from trainclient.exchange.message_header import Kind
from trainclient.modules import TrainedModule, rows_of
from trainclient.training.config import ConfigError

TOWER_FROZEN: Final = "tower frozen"
"""How a module is called whose projector is trained alone."""


def require_freezable(module: ModuleSpec, *, adapted: bool) -> None:
    """Raise ConfigError if a module has no tower that could be frozen, or is frozen in another way too.

    Args:
        module: of the job.
        adapted: whether it has adapters.
    """
    reasons = {
        f"is of kind {module.kind}, which has no projector; freeze it whole (frozen: true in the job)": rows_of(module)
        is not Kind.EMBEDDINGS,
        "is frozen whole by the job; leave one of them out": module.frozen,
        "has lora adapters, beside which its projector is trained anyhow; leave one of them out": adapted,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise ConfigError(f"module {module.name} has freeze_tower, but {reason}")


def freeze_tower(made: TrainedModule, name: str) -> None:
    """Train nothing of an encoder but what turns features into rows (`projecting` of its network).

    Raises:
        ConfigError: nothing says what that is, or the network has nothing of that name.
    """
    projecting = tuple(getattr(made.network, "projecting", ()))
    for parameter_name, parameter in made.network.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and parameter_name.startswith(projecting))
    if not any(parameter.requires_grad for parameter in made.network.parameters()):
        raise ConfigError(
            f"module {name} has freeze_tower, and nothing says which of its parameters project: give "
            f"{type(made.network).__name__} an attribute `projecting`, a tuple of what their names begin with"
        )
    made.trains_weights = made.passes_gradients = False


def frozen_parts(network: nn.Module, name: str) -> list[str]:
    """What is frozen of a module of that name, by as few names as say it: children, or parameters of mixed ones."""
    trained = {path.partition(".")[0] for path, parameter in network.named_parameters() if parameter.requires_grad}
    found = [path for path, parameter in network.named_parameters() if not parameter.requires_grad]
    children = ((path.partition(".")[0], path) for path in found)
    return list(dict.fromkeys(f"{name}.{path if child in trained else child}" for child, path in children))


def training_of(name: str, frozen: Sequence[str]) -> str:
    """How a module is trained where these modules and parts are frozen: frozen, `TOWER_FROZEN` or trained."""
    if name in frozen:
        return "frozen"
    return TOWER_FROZEN if any(part.startswith(f"{name}.") for part in frozen) else "trained"
