"""What the last stages of all towers gather for the interaction of a contrastive batch, in one order on all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainclient.exchange.communicators import Collective
from trainclient.exchange.gathered_features import GatheredFeatures
from trainclient.exchange.message_header import (
    BrokerMismatchError,
    Kind,
    MessageType,
    MicrobatchId,
    join,
    make_header,
    split,
)
from trainclient.stream.microbatch import Items
from trainclient.upload import upload

NAME_BYTES = 24
"""Dataset, epoch and sample, int64 each."""


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """The features of n samples with their names."""

    names: Tensor
    """int64 [n, 3] on the CPU: dataset, epoch and sample, unique within a step."""
    valid: Tensor
    """bool [n] on the CPU: False where the sample is known to have something that cannot be decoded."""
    features: Tensor
    """[n, width]: one row for each sample."""

    @classmethod
    def of(cls, several: Sequence[tuple[Items, Tensor]]) -> "Named":
        """Those of some microbatches together."""
        names = [np.stack([i.dataset, i.epoch, i.sample.view(np.int64)], axis=1) for i, _ in several]
        valid = [~i.invalid for i, _ in several]
        return cls(
            torch.from_numpy(np.concatenate(names)),
            torch.from_numpy(np.concatenate(valid)),
            torch.cat([features for _, features in several]),
        )


class FeatureGathering:
    """One process among the last stages of all towers."""

    def __init__(self, collective: Collective, ranks: Sequence[int], towers: Sequence[str]) -> None:
        """Gather from all.

        Args:
            collective: the last stages.
            ranks: their global ranks.
            towers: and their towers; those of one stand together.
        """
        self.tower = towers[collective.rank]
        self._collective = collective
        self._ranks = tuple(ranks)
        self._towers = tuple(towers)

    def features(
        self, microbatch_id: MicrobatchId, own: Named, scale: Tensor, pairs: int
    ) -> Callable[[], GatheredFeatures]:
        """Begin to gather the contrastive batch of `pairs` samples; this process has `own`.

        Args:
            microbatch_id: the plan, the step, and the number of the contrastive batch.
            own: of this process.
            scale: float64 [2]; that of the first rank counts.
            pairs: samples of the batch; each tower has all of them, its ranks equal shares.

        Returns:
            What waits for it. It raises BrokerMismatchError if another process runs something else, or the towers have
            other samples, and RankLostError if another process is gone.
        """
        width, dtype = own.features.shape[1], own.features.dtype
        counts = [pairs // self._towers.count(tower) for tower in self._towers]
        row = NAME_BYTES + width * own.features.element_size()
        device = self._collective.device
        payload = torch.cat([_bytes(upload(scale, device)), _bytes(upload(own.names, device)), _bytes(own.features)])
        coming = self._all(Kind.FEATURES, microbatch_id, own.valid, payload, [(n, 2 * 8 + n * row) for n in counts])

        def gathered() -> GatheredFeatures:
            found, names, valid, features = coming(), [], [], []
            for (bits, message), count in zip(found, counts, strict=True):
                start = 16 + count * NAME_BYTES
                names.append(message[16:start].clone().view(torch.int64).view(count, 3).cpu())
                valid.append(bits)
                features.append(message[start:].clone().view(dtype).view(count, width))
            return self._sorted(names, valid, features, found[0][1][:16].clone().view(torch.float64))

        return gathered

    def numbers(
        self, microbatch_id: MicrobatchId, own: Tensor, pairs: int, lists: int, more: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Numbers of all processes, by their position among them.

        Args:
            microbatch_id: as for `features`.
            own: float64 [lists x n + lists x more] of this process, which has n samples of the batch.
            pairs: samples of the batch.
            lists: how many lists of as many numbers as samples; and of `more`, which follow them.
            more: numbers of each of these.

        Returns:
            float64 [lists, n] and [lists, more] of each.

        Raises:
            BrokerMismatchError: another process runs another step or plan.
            RankLostError: another process is gone.
        """
        each = [pairs // self._towers.count(tower) for tower in self._towers]
        none, sizes = torch.ones(0, dtype=torch.bool), [(0, 8 * lists * (n + more)) for n in each]
        found, coming = [], self._all(Kind.NORMALISERS, microbatch_id, none, _bytes(own), sizes)
        for (_, message), n in zip(coming(), each, strict=True):
            first, second = torch.split(message.clone().view(torch.float64), [lists * n, lists * more])
            found.append((first.view(lists, n), second.view(lists, more)))
        return found

    def of_tower(self, tower: str) -> range:
        """Positions of a tower's ranks."""
        first = self._towers.index(tower)
        return range(first, first + self._towers.count(tower))

    @property
    def towers(self) -> tuple[str, ...]:
        """All of them, in the order of the job."""
        return tuple(dict.fromkeys(self._towers))

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of all."""
        return self._collective.rank == 0

    def _all(
        self, kind: Kind, microbatch_id: MicrobatchId, valid: Tensor, payload: Tensor, sizes: Sequence[tuple[int, int]]
    ) -> Callable[[], list[tuple[Tensor, Tensor]]]:
        """Begin to hand bytes to all; what waits for theirs, as many valid bits and bytes as `sizes` say."""
        me, ranks, message_type = self._collective.rank, self._ranks, MessageType(kind)
        leaving = [
            make_header(message_type, microbatch_id, len(valid), len(payload), ranks[me], rank) for rank in ranks
        ]
        arriving = [
            make_header(message_type, microbatch_id, *size, rank, ranks[me])
            for size, rank in zip(sizes, ranks, strict=True)
        ]
        messages = [join(header, valid, payload) for header in leaving]
        work = self._collective.all_to_all(("", ""), messages, [header.message_bytes for header in arriving])

        def arrived() -> list[tuple[Tensor, Tensor]]:
            decoded = zip(work.wait(), arriving, strict=True)
            found = [split(message, header, max(1, header.row_bytes), torch.uint8) for message, header in decoded]
            return [(bits, rows.reshape(-1)) for bits, rows in found]

        return arrived

    def _sorted(
        self, names: list[Tensor], valid: list[Tensor], features: list[Tensor], scale: Tensor
    ) -> GatheredFeatures:
        together: dict[str, Tensor] = {}
        order: dict[str, Tensor] = {}
        counts, expected = torch.ones(0, dtype=torch.bool), torch.zeros(0, 3, dtype=torch.int64)
        for tower in self.towers:
            here = self.of_tower(tower)
            unsorted = torch.cat([names[i] for i in here])
            order[tower] = torch.from_numpy(np.lexsort(unsorted.numpy().T[::-1]))
            held, bits = unsorted[order[tower]], torch.cat([valid[i] for i in here])[order[tower]]
            if len(expected) and not torch.equal(held, expected):
                raise BrokerMismatchError(
                    f"towers {self.towers[0]} and {tower} have other samples in one contrastive batch; all ranks must "
                    "read the same job from servers of one fleet"
                )
            expected, counts = held, bits & counts if len(counts) else bits
            whole = torch.cat([features[i] for i in here])
            together[tower] = whole.index_select(0, upload(order[tower], whole.device))
        mine = self.of_tower(self.tower)
        before = sum(len(names[i]) for i in mine if i < self._collective.rank)
        positions = order[self.tower].argsort()[before : before + len(names[self._collective.rank])]
        return GatheredFeatures(together, counts, positions, order, scale)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
