"""A data set and a model for the example of the documentation: texts, half of them with an image, and one softmax."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

SAMPLES, WORDS = 90, 300
Sample = tuple[list[int], list[Image.Image]]


class Samples:
    """Tokens and images of each."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        lengths, sides = draw.integers(20, 100, SAMPLES), draw.integers(28, 84, (SAMPLES, 2))
        self._ids = [draw.integers(0, WORDS, length).tolist() for length in lengths]
        self._sizes = [side.tolist() if number % 2 else None for number, side in enumerate(sides)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Sample:
        if number >= SAMPLES:
            raise IndexError(number)
        size = self._sizes[number]
        return self._ids[number], [Image.new("RGB", size, (number, 0, 0))] if size else []


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"text": nn.Embedding(WORDS, 8), "vision": nn.Linear(3, 8)})


def collate(samples: list[Sample]) -> list[tuple[Tensor, Tensor]]:
    """Token ids, and the mean color of the images, of each sample."""
    colors = [np.mean([np.array(image).mean((0, 1)) for image in images] or [[0.0] * 3], 0) for _, images in samples]
    return [(torch.tensor(ids), torch.tensor(c).float()) for (ids, _), c in zip(samples, colors, strict=True)]


def loss_of(model: Any, batch: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Sum over the tokens of a microbatch."""
    rows = torch.cat([model["text"](ids[:-1]) + model["vision"](color / 255) for ids, color in batch])
    targets = torch.cat([ids[1:] for ids, _ in batch])
    return nn.functional.cross_entropy(rows @ model["text"].weight.T, targets, reduction="sum")
