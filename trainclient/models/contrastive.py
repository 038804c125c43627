"""Contrastive losses of one rank's features against those of all, with their gradients in closed form.

A rank of a tower has some rows of the matrix of scores between its tower and another: those of its own samples. The
other tower's ranks have the columns as rows of theirs. So each loss here is the half that belongs to a rank's own rows:
over all ranks of both towers the halves make up the loss, and each rank finds the whole gradient of its own features
without a matrix larger than its own rows x all samples (as in SigLIP, arXiv 2303.15343, section 3.3).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from types import MappingProxyType
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainclient.models.contrastive_loss import ContrastiveLoss
from trainclient.models.rotary import at_least_float32

MAX_TEMPERATURE: Final = 100.0
"""Above it features are multiplied with no more (CLIP, arXiv 2103.00020, section 2.5)."""


class Scale(nn.Module):
    """What scores are multiplied with and moved by: a learned temperature, and for SigLIP a learned bias."""

    def __init__(self, loss: ContrastiveLoss) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.empty(1))
        self.initial_values = {"log_temperature": log(1 / 0.07)}
        if loss is ContrastiveLoss.SIGLIP:
            self.offset = nn.Parameter(torch.empty(1))
            self.initial_values = {"log_temperature": log(10.0), "offset": -10.0}

    def forward(self) -> Tensor:
        """Temperature and bias, [2]; a temperature that is cut off keeps its gradient, so that it can come back."""
        temperature = self.log_temperature.exp()
        temperature = temperature - (temperature - MAX_TEMPERATURE).clamp(min=0).detach()
        offset = self.offset if hasattr(self, "offset") else torch.zeros_like(temperature)
        return torch.cat([temperature, offset])


class ScoreRows(ABC):
    """The rows of one rank, of the scores between its tower and another."""

    def __init__(self, own: Tensor, others: Tensor, partner: Tensor, valid: Tensor, scale: Tensor) -> None:
        """Score the rank's samples with all of the other tower.

        Args:
            own: [n, width], features of the rank's samples; computed with in float32 or better.
            others: [B, width], those of all samples of the contrastive batch in the other tower.
            partner: int64 [n]: which of these belongs to each own sample.
            valid: bool [B]: which samples count.
            scale: [2], temperature and bias.
        """
        own, others = (features.to(at_least_float32(features.dtype)) for features in (own, others))
        scale = scale.to(own)
        self._others, self._temperature = others, scale[0]
        self._raw = own @ others.T
        self._scores = (scale[0] * self._raw + scale[1]).masked_fill(~valid, -torch.inf)
        self._match = F.one_hot(partner, len(others)).to(own)
        self._counts = valid[partner].to(own)[:, None]

    @abstractmethod
    def half(self) -> "Half":
        """What these rows add to the loss."""

    def gradient(self, normalisers: Tensor) -> Tensor:
        """That of the whole loss by the own features, [n, width]; `normalisers` [B] are those of the other tower."""
        return self._temperature * (self._slope(normalisers.to(self._raw)) @ self._others)

    @abstractmethod
    def _slope(self, normalisers: Tensor) -> Tensor:
        """The gradient of the whole loss by the scores, [n, B]."""

    def _half(self, losses: Tensor, slope: Tensor, normalisers: Tensor) -> "Half":
        return Half(losses.sum() / 2, torch.stack([(slope * self._raw).sum(), slope.sum()]) / 2, normalisers)


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """What a rank's rows add to a loss."""

    loss: Tensor
    """Loss of the batch, a scalar."""
    scale: Tensor
    """[2]: gradient by temperature and bias."""
    normalisers: Tensor
    """[n]: what the columns of the other tower's ranks must know of the rows."""


class ClipRows(ScoreRows):
    """Cross entropies of rows; those of columns are the other tower's."""

    def half(self) -> Half:
        """Return what these rows add to the loss; normalisers are the logarithms of sums of exponentials, 0 where a
        sample does not count."""
        counted = self._counts[:, 0] > 0
        normalisers = self._scores.logsumexp(1).masked_fill(~counted, 0)
        own = self._scores.masked_fill(self._match == 0, 0).sum(1).masked_fill(~counted, 0)
        both = (self._scores - normalisers[:, None]).exp() - self._match
        slope = both.where(counted[:, None], 0)  # a product would keep what overflowed
        return self._half(normalisers - own, slope, normalisers)

    def _slope(self, normalisers: Tensor) -> Tensor:
        own = self._scores.logsumexp(1, keepdim=True)
        both = (self._scores - own).exp() + (self._scores - normalisers).exp()
        return (both / 2 - self._match).where(self._counts > 0, 0)


class SiglipRows(ScoreRows):
    """Each pair alone; both of its ranks count one half of it."""

    def half(self) -> Half:
        """Return what these rows add to the loss; there is nothing that columns must know."""
        sign = 2 * self._match - 1
        losses = F.softplus(-sign * self._scores).masked_fill(self._scores.isneginf(), 0) * self._counts
        return self._half(losses, self._slope(losses[0]), losses.new_zeros(len(losses)))

    def _slope(self, normalisers: Tensor) -> Tensor:
        del normalisers
        sign = 2 * self._match - 1
        slope = -sign * torch.sigmoid(-sign * self._scores) * self._counts
        return slope.masked_fill(self._scores.isneginf(), 0)


SCORES: Final[Mapping[ContrastiveLoss, type[ScoreRows]]] = MappingProxyType(
    {ContrastiveLoss.CLIP: ClipRows, ContrastiveLoss.SIGLIP: SiglipRows}
)
