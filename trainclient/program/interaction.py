"""The interaction of a contrastive batch: its loss, and the gradients of the features (DISTMM, NSDI 2024, section 4.3).

All last stages of all towers run it together. Each finds the gradients of its own features from those of all, which
were gathered; no gradient crosses between processes.
"""

import torch
from torch import Tensor

from dataserver.planning.jobspec import Stream
from dataserver.planning.simulation import Operation
from trainclient.client import Batch
from trainclient.exchange.gathering import Gathered, Gathering, Named
from trainclient.exchange.messages import Stamp
from trainclient.modules import Features, ScoreRows
from trainclient.program.clock import Clock

SCALES = 2
"""Temperature and bias."""


class Interaction:
    """One process's part in the interactions of a step."""

    def __init__(self, stream: Stream, gathering: Gathering, clock: Clock) -> None:
        """Run interactions.

        Args:
            stream: of the job.
            gathering: from the last stages of all towers.
            clock: of this process.
        """
        self._pairs = stream.contrastive_batch or 1
        self._planned = stream.global_batch
        self._gathering = gathering
        self._clock = clock
        self._made: list[tuple[Batch, Features]] = []
        """Since the last interaction."""
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}

    def add(self, batch: Batch, features: Features) -> None:
        """Take what a forward has made."""
        self._made.append((batch, features))

    def run(self, operation: Operation) -> Tensor:
        """Run an interaction, after the last forward of its contrastive batch.

        Returns:
            What this process adds to the sum of the losses of all pairs, scalar.

        Raises:
            BrokerMismatchError: another process runs something else.
            PeerLostError: another process is gone.
        """
        made, self._made = self._made, []
        batch, features = made[0]
        stamp = Stamp(batch.plan_hash, batch.step, operation.microbatch)
        own = Named.of([(b.items, f.values.detach()) for b, f in made])
        scale = torch.zeros(2) if features.scale is None else features.scale.detach()
        found = self._gathering.features(stamp, own, scale.to(torch.float64), self._pairs)
        with self._clock.running(operation):
            loss, values, slope = self._loss(stamp, found, own.features, features.scores)
        parts = torch.split((values / self._planned).to(own.features.dtype), [len(f.values) for _, f in made])
        for part, (of, _) in zip(parts, made, strict=True):
            counted = self._gathering.is_first and of is batch
            self._gradients[of.microbatch] = part, (slope / self._planned).to(part) if counted else None
        return loss

    def roots(self, microbatch: int, features: Features) -> list[tuple[Tensor, Tensor]]:
        """What a backward begins with, after the interaction: what a microbatch has made, and the gradient of each.

        That of the scale is given once for each contrastive batch, in one process.
        """
        values, scale = self._gradients.pop(microbatch)
        found = [(features.values, values)]
        return found if scale is None or features.scale is None else [*found, (features.scale, scale)]

    def _loss(
        self, stamp: Stamp, found: Gathered, own: Tensor, scores: type[ScoreRows]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This process's part of the sum of the losses; the gradients of that sum by its features and by the scale."""
        gathering, tower, place = self._gathering, self._gathering.tower, found.own.to(own.device)
        others = [name for name in gathering.towers if name != tower]
        valid, scale = found.valid.to(own.device), found.scale.to(own.device)
        rows = [scores(own, found.features[other], place, valid, scale) for other in others]
        halves = [each.half() for each in rows]
        numbers = torch.cat([*(half.normalisers for half in halves), *(half.scale for half in halves)])
        several = gathering.numbers(stamp, numbers.to(torch.float64), self._pairs, len(halves), SCALES)
        slope = torch.stack([scales.sum(0) for _, scales in several]).sum(0)
        gradients = []
        for each, other in zip(rows, others, strict=True):
            position = [name for name in gathering.towers if name != other].index(tower)
            unsorted = torch.cat([several[rank][0][position] for rank in gathering.of_tower(other)])
            gradients.append(each.gradient(unsorted[found.order[other].to(own.device)]))
        pairs_of_towers = len(gathering.towers) * len(others) / 2
        sums = torch.stack([half.loss for half in halves]).sum(), torch.stack(gradients).sum(0), slope
        loss, gradient, slope = (total / pairs_of_towers for total in sums)
        return loss, gradient, slope
