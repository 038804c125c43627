"""Low-rank adapters (LoRA, arXiv 2106.09685): linear layers whose weights stay, with two thin ones beside."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor, nn

_DOWN, _UP = "lora_down.weight", "lora_up.weight"
_BLOCKS: Final = "layers."
"""What the names of all blocks begin with."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What adapters a network has."""

    rank: int
    """Inner width of each adapter."""
    alpha: float
    """Their outputs are multiplied with alpha / rank."""
    targets: list[str]
    """Names of the linear layers of blocks that have one: query, key, value, output, gate, up, down."""

    @property
    def scale(self) -> float:
        """Factor of what adapters add."""
        return self.alpha / self.rank


class _Up(nn.Linear):
    """Begins at zero, so that an adapter changes nothing at first."""

    initial_std = 0.0


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter; its own parameters keep their names."""

    def __init__(self, base: nn.Linear, adapters: LowRank) -> None:
        """Take the place of a layer, whose parameters have no values yet."""
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.scale = adapters.scale
        self.lora_down = nn.Linear(base.in_features, adapters.rank, bias=False)
        self.lora_up = _Up(adapters.rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return super().forward(x) + self.scale * cast(Tensor, self.lora_up(self.lora_down(x)))


def adapt(network: nn.Module, adapters: LowRank) -> None:
    """Put adapters into the blocks of a network that has no values yet, and leave only them to be trained.

    Trained beside them are parameters whose names begin as the network's `beside_adapters` says: what checkpoints of
    others do not have, or what turns features into rows of another module.

    Raises:
        ValueError: blocks have no layer of a name; the message is the end of a sentence about the targets.
    """
    there = set()
    for module in [module for path, module in network.named_modules() if path.startswith(_BLOCKS)]:
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                there.add(name)
            if name in adapters.targets and type(child) is nn.Linear:
                setattr(module, name, AdaptedLinear(child, adapters))
    if absent := [target for target in adapters.targets if target not in there]:
        raise ValueError(f"name {', '.join(absent)}, and its blocks have {', '.join(sorted(there))}; name these alone")
    begins = getattr(network, "beside_adapters", ())
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(is_adapter(name) or name.startswith(begins))


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return name.endswith((_DOWN, _UP))


def adapter_pairs(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The adapters of a network's parameters: the name of each layer, and its two weights."""
    for name, down in state.items():
        if name.endswith(f".{_DOWN}"):
            layer = name.removesuffix(f".{_DOWN}")
            yield layer, down, state[f"{layer}.{_UP}"]


def merged(state: Mapping[str, Tensor], adapters: LowRank) -> dict[str, Tensor]:
    """The parameters of a network without adapters that computes the same: W + alpha / rank x up down."""
    found = {name: tensor for name, tensor in state.items() if not is_adapter(name)}
    for layer, down, up in adapter_pairs(state):
        weight = found[f"{layer}.weight"]
        precise = torch.promote_types(weight.dtype, up.dtype)  # what stays may be bfloat16, what is trained is not
        sum_ = weight.to(precise) + adapters.scale * (up.to(precise) @ down.to(precise))
        found[f"{layer}.weight"] = sum_.to(weight.dtype)
    return found
