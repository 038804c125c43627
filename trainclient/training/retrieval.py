"""Zero-shot retrieval: how often what belongs to a sample in another tower is among the nearest of all that there is.

As CLIP reports it (arXiv 2103.00020, section 3.1): every sample asks with its feature of one tower for its own feature
of another one, among those of all samples that are evaluated.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Final

import torch
from torch import Tensor

from trainclient.exchange.gathered_features import GatheredFeatures

AMONG: Final = (1, 5, 10)
"""Recall is the share of samples whose own feature is one of so many nearest."""
MAX_RETRIEVED: Final = 2**17
"""Samples that are compared with each other at most: every last stage keeps the features of all."""
MAX_SCORES: Final = 2**24
"""Scores that are in memory at once, but for one sample's."""


class Retrieval:
    """One process's part: it asks for its own samples, among all.

    A pair with anything that cannot be decoded neither asks nor is found. Among features as near as one's own,
    all count as nearer, so that towers to which all samples look alike find nothing.
    """

    def __init__(self, towers: Sequence[str], tower: str | None) -> None:
        """Take the samples of some towers.

        Args:
            towers: all of a job.
            tower: that of the process whose samples ask; None where it asks for none.
        """
        self._towers = tuple(towers)
        self._tower = tower
        self._gathered: list[GatheredFeatures] = []

    def add(self, found: GatheredFeatures) -> None:
        """Take one contrastive batch, as all last stages gathered it."""
        if self._tower is not None:
            self._gathered.append(found)

    @property
    def names(self) -> Iterator[str]:
        """What is counted, as metrics name it, in the order of `counts`."""
        for here, there in permutations(self._towers, 2):
            yield from (f"{here}_to_{there}_r{k}" for k in AMONG)

    def counts(self) -> Tensor:
        """Samples of this process whose own one was among the nearest, and samples that asked, and forget all of them.

        Returns:
            int64 [pairs of towers, len(AMONG) + 1], for each ordered pair of towers.
        """
        gathered, self._gathered = self._gathered, []
        rows = [
            self._row(gathered, there) if here == self._tower and gathered else torch.zeros(len(AMONG) + 1).long()
            for here, there in permutations(self._towers, 2)
        ]
        return torch.stack(rows)

    def _row(self, gathered: Sequence[GatheredFeatures], there: str) -> Tensor:
        """What is counted of this process's samples in one other tower, int64 [len(AMONG) + 1] on the CPU."""
        candidates = torch.cat([g.features[there][g.valid.to(g.features[there].device)] for g in gathered])
        candidates = candidates.to(torch.promote_types(candidates.dtype, torch.float32))
        found, first = torch.zeros(len(AMONG) + 1, dtype=torch.int64), 0
        among = torch.tensor(AMONG)
        for g in gathered:
            position = g.valid.cumsum(0) - 1 + first
            mine = g.own[g.valid[g.own]]
            asking = g.features[str(self._tower)][mine.to(candidates.device)].to(candidates)
            several = max(1, MAX_SCORES // max(1, len(candidates)))
            parts = torch.split(asking, several), torch.split(position[mine], several)
            for queries, partner in zip(*parts, strict=True):
                scores = queries @ candidates.T
                own = scores.gather(1, partner[:, None].to(scores.device))
                nearer = (~(scores < own)).sum(1).cpu() - 1  # not `>=`: what is not a number finds nothing
                found += torch.cat([(nearer[:, None] < among).sum(0), torch.tensor([len(queries)])])
            first += int(g.valid.sum())
        return found


def require_comparable(num_samples: int) -> None:
    """Raise ValueError if so many samples cannot be compared with each other."""
    if num_samples > MAX_RETRIEVED:
        raise ValueError(
            f"the evaluation compares {num_samples} samples with each other, more than {MAX_RETRIEVED}; lower "
            "evaluation.steps, or the end of its job"
        )


def recall(retrieval: Retrieval, counts: Tensor) -> dict[str, float] | None:
    """Recall by name, of the counts of all processes together; None where no pair could be decoded."""
    hits, asked = counts[:, :-1], counts[:, -1:]
    if not bool((asked > 0).all()):
        return None
    shares = (hits.double() / asked).flatten().tolist()
    return dict(zip(retrieval.names, shares, strict=True))
