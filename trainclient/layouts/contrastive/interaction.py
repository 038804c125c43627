"""The interaction of a contrastive batch: its loss, and the gradients of the features (DISTMM, NSDI 2024, section 4.3).

All last stages of all towers run it together. Each finds the gradients of its own features from those of all, which
were gathered; no gradient crosses between processes.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dataserver.planning.job.spec import JobSpec
from dataserver.planning.simulation import Operation
from trainclient.client import Batch
from trainclient.exchange.gathered_features import GatheredFeatures
from trainclient.exchange.message_header import MicrobatchId
from trainclient.layouts.contrastive.feature_gathering import FeatureGathering, Named
from trainclient.modules import Features, Half, ScoreRows
from trainclient.program.clock import Clock
from trainclient.upload import upload

SCALES = 2
"""Number of learned scales: temperature and bias."""


class ContrastiveInteraction:
    """One process's part in the interactions of a step."""

    def __init__(
        self,
        spec: JobSpec,
        gathering: FeatureGathering,
        clock: Clock,
        observe: Callable[[GatheredFeatures], None] | None = None,
    ) -> None:
        """Run interactions.

        Args:
            spec: of the job.
            gathering: from the last stages of all towers.
            clock: of this process.
            observe: gets all features, if they are to be compared with those of other contrastive batches too.
        """
        self._pairs = spec.stream.contrastive_batch or 1
        self._planned = spec.stream.global_batch
        self._learns = any(tower.runs_backward for tower in spec.execution.modules)
        self._returns = spec.execution.module(gathering.tower).runs_backward
        self._gathering = gathering
        self._observe = observe
        self._clock = clock
        self._made: list[tuple[Batch, Features]] = []
        """Features that were made since the last interaction, batch by batch."""
        self._under_way: tuple[MicrobatchId, Named, Callable[[], GatheredFeatures]] | None = None
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}

    def add(self, batch: Batch, features: Features) -> None:
        """Take what a forward has made."""
        self._made.append((batch, features))

    def flush(self, number: int) -> None:
        """Begin to gather the features of a contrastive batch, behind the last forward of it. See `Buffer`."""
        batch, features = self._made[0]
        microbatch_id = MicrobatchId(batch.plan_hash, batch.step, number)
        own = Named.of([(b.items, f.values.detach()) for b, f in self._made])
        scale = torch.zeros(2) if features.scale is None else features.scale.detach()
        coming = self._gathering.features(microbatch_id, own, scale.to(torch.float64), self._pairs)
        self._under_way = microbatch_id, own, coming

    def run(self, operation: Operation) -> Tensor:
        """Run an interaction, after its features have left.

        Returns:
            What this process adds to the sum of the losses of all pairs, scalar.

        Raises:
            BrokerMismatchError: another process runs another step or plan.
            RankLostError: another process is gone.
        """
        if self._under_way is None:
            raise RuntimeError(f"the program has the {operation.kind} of features that have not been exchanged")
        (microbatch_id, own, coming), self._under_way = self._under_way, None
        found, made, self._made = coming(), self._made, []
        batch, features = made[0]
        if self._observe is not None:
            self._observe(found)
        with self._clock.running(operation):
            rows, halves = self._halves(found, own.features, features.scores)
            loss = torch.stack([half.loss for half in halves.values()]).sum() / self._pairs_of_towers
            if not self._learns:
                return loss
            values, slope = self._gradients_of(microbatch_id, found, rows, halves)
        if not self._returns:
            return loss
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

    @property
    def _pairs_of_towers(self) -> float:
        towers = len(self._gathering.towers)
        return towers * (towers - 1) / 2

    def _halves(
        self, found: GatheredFeatures, own: Tensor, scores: type[ScoreRows]
    ) -> tuple[dict[str, ScoreRows], dict[str, Half]]:
        """The scores of this process's samples with all of each other tower, and what they add to the loss."""
        position, valid, scale = (upload(t, own.device) for t in (found.own, found.valid, found.scale))
        others = [name for name in self._gathering.towers if name != self._gathering.tower]
        rows = {other: scores(own, found.features[other], position, valid, scale) for other in others}
        return rows, {other: each.half() for other, each in rows.items()}

    def _gradients_of(
        self,
        microbatch_id: MicrobatchId,
        found: GatheredFeatures,
        rows: Mapping[str, ScoreRows],
        halves: Mapping[str, Half],
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the sum of the losses of all pairs by this process's features, and by the scale."""
        gathering, tower = self._gathering, self._gathering.tower
        numbers = torch.cat([*(h.normalisers for h in halves.values()), *(h.scale for h in halves.values())])
        several = gathering.numbers(microbatch_id, numbers.to(torch.float64), self._pairs, len(halves), SCALES)
        slope = torch.stack([scales.sum(0) for _, scales in several]).sum(0)
        gradients = []
        for other, each in rows.items():
            position = [name for name in gathering.towers if name != other].index(tower)
            unsorted = torch.cat([several[rank][0][position] for rank in gathering.of_tower(other)])
            gradients.append(each.gradient(unsorted[upload(found.order[other], unsorted.device)]))
        return torch.stack(gradients).sum(0) / self._pairs_of_towers, slope / self._pairs_of_towers
