"""Microbatches for the small networks of tests, as a network and the lengths of its segments want them."""

import torch
from torch import Tensor, nn

from trainclient.models.backbone import BackboneBatch

WIDTH, VOCAB, PATCH = 32, 50, 2


def offsets(lengths: tuple[int, ...], times: int = 1) -> Tensor:
    return torch.tensor([0, *(times * n for n in lengths)]).cumsum(0)


def images(lengths: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels, grids and offsets of images of 4 rows of patches."""
    cu = offsets(lengths, 8)
    patches = torch.randint(0, 256, (int(cu[-1]), PATCH**2 * 3), dtype=torch.uint8, generator=generator)
    return patches, torch.tensor([[4, 2 * n] for n in lengths], dtype=torch.int64).view(-1, 2), cu


def backbone(network: nn.Module, lengths: tuple[int, ...], generator: torch.Generator) -> Tensor:
    cu, none = offsets(lengths), torch.zeros(0, dtype=torch.int64)
    tokens, labels = (torch.randint(0, VOCAB, (int(cu[-1]),), generator=generator) for _ in range(2))
    found: Tensor = network(BackboneBatch(cu, torch.arange(len(tokens)), tokens, none, none, labels)).loss_sum
    return found


def encoder(network: nn.Module, lengths: tuple[int, ...], generator: torch.Generator) -> Tensor:
    found: Tensor = network(*images(lengths, generator))
    return found.square().sum()


def generator_(network: nn.Module, lengths: tuple[int, ...], generator: torch.Generator) -> Tensor:
    patches, grid, cu = images(lengths, generator)
    noise, time = (
        torch.randn(len(patches), PATCH**2 * 3, generator=generator),
        torch.rand(len(grid), generator=generator),
    )
    conditions = torch.randn(3 * len(grid), WIDTH, generator=generator)
    counted = torch.ones(len(grid), dtype=torch.bool)
    found: Tensor = network(patches, grid, cu, conditions, 3 * torch.arange(len(grid) + 1), noise, time, counted)
    return found
