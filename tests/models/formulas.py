"""Norms, activations, layers and attention by their formulas, in float64: dense, and without any layer of ours.

The names of parameters are those of our models.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Values = Mapping[str, Tensor]
"""Parameters by their names."""
Angles = list[list[float]]
"""Of each row, by which each pair of a head turns."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def layer_norm(x: Tensor, p: Values, name: str, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return rms_norm(centred, p[f"{name}.weight"], eps) + p[f"{name}.bias"]


def linear(x: Tensor, p: Values, name: str, *, bias: bool) -> Tensor:
    made = x @ p[f"{name}.weight"].T
    return made + p[f"{name}.bias"] if bias else made


def _gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def _gelu_tanh(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


def gated(x: Tensor, p: Values, name: str, activation: str, *, bias: bool = True) -> Tensor:
    gate, up = (linear(x, p, f"{name}.{kind}", bias=bias) for kind in ("gate", "up"))
    return linear(ACTIVATIONS[activation](gate) * up, p, f"{name}.down", bias=bias)


def mlp(x: Tensor, p: Values, name: str, activation: str = "gelu") -> Tensor:
    return linear(ACTIVATIONS[activation](linear(x, p, f"{name}.up", bias=True)), p, f"{name}.down", bias=True)


def turned(heads: Tensor, angles: Angles) -> Tensor:
    """Heads [rows, heads, size], whose pairs lie half a head from each other, as complex numbers."""
    by = torch.tensor(angles, dtype=torch.float64)
    first, second = heads.chunk(2, -1)
    found = torch.complex(first, second) * torch.complex(by.cos(), by.sin())[:, None]
    return torch.cat([found.real, found.imag], -1)


def same(x: Tensor, *_: str) -> Tensor:
    return x


def attention(
    x: Tensor,
    p: Values,
    name: str,
    size: int,
    sees: list[list[bool]],
    turn: Callable[[Tensor], Tensor],
    norm: Callable[[Tensor, str], Tensor] = same,
    scale: float = 0.0,
    biases: tuple[bool, bool] = (True, True),
) -> Tensor:
    """Rows [n, width] that see each other as `sees` says; heads of `size`, and of keys and values maybe fewer. Biases
    are those of queries, keys and values, and of the output."""
    kinds = ("query", "key", "value")
    query, key, value = (linear(x, p, f"{name}.{kind}", bias=biases[0]).view(len(x), -1, size) for kind in kinds)
    query, key = turn(norm(query, f"{name}.query_norm")), turn(norm(key, f"{name}.key_norm"))
    mask, mixed = torch.tensor(sees), []
    for head in range(query.shape[1]):
        group = head * key.shape[1] // query.shape[1]
        scores = query[:, head] @ key[:, group].T * (scale or size**-0.5)
        weights = scores.exp() * mask
        mixed.append(weights / weights.sum(1, keepdim=True) @ value[:, group])
    return linear(torch.cat(mixed, 1), p, f"{name}.output", bias=biases[1])
