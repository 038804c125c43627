"""One fetch of a view for all ranks that work on it: one of them receives it from the servers and hands it on."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainclient.client import Batch, DataClient, batch_with_room, with_room
from trainclient.exchange.gathering import broadcast_bytes
from trainclient.exchange.lost_ranks import translate_rank_errors
from trainclient.exchange.message_header import BrokerMismatchError
from trainclient.exchange.view_groups import SharedSequences


class Batches(Iterator[Batch], Protocol):
    """Microbatches in plan order, as `DataClient` has them."""

    @property
    def ready(self) -> bool:
        """Whether the next one is there already."""


class BroadcastBatches(Iterator[Batch]):
    """The microbatches that the leader's client reads and broadcasts, headers and tensors.

    The clients of the others read nothing.
    """

    ready = False
    """All ranks of the group read together, so nothing is known to be ready."""

    def __init__(self, client: DataClient, group: ProcessGroup, *, pin: bool) -> None:
        """Broadcast what the leader's client reads.

        Args:
            client: of this process.
            group: over gloo, of the processes that work on the same views.
            pin: whether to take into page-locked memory.
        """
        self._client = client
        self._group = group
        self._pin = pin

    def __next__(self) -> Batch:
        is_leader = self._group.rank() == 0
        batch = self._handed_on(next(self._client, None) if is_leader else None)
        if batch is None:
            raise StopIteration
        if not is_leader:
            self._client.follow(batch)
        return batch

    def _handed_on(self, batch: Batch | None) -> Batch | None:
        """The leader's microbatch; None at the end of the stream."""
        header = b"" if batch is None else batch.header.SerializeToString()
        with translate_rank_errors("other ranks of the group"):
            header = broadcast_bytes(header, self._group)
            if not header:
                return None
            if batch is None:
                batch = batch_with_room(header, pin_memory=self._pin)
            for tensor in batch.tensors.values():
                dist.broadcast(tensor.view(-1).view(torch.uint8), group_src=0, group=self._group)
        return batch


class SharedBatches(Iterator[Batch]):
    """The microbatches of a rank that shares sequences; of each group one rank has fetched the tensors for all.

    They are broadcast while the ranks compute, so that each may read ahead of the others.
    """

    def __init__(
        self, batches: Batches, shared: SharedSequences, groups: Mapping[tuple[int, ...], ProcessGroup], *, pin: bool
    ) -> None:
        """Broadcast the tensors that only one client of a group fetches.

        Args:
            batches: of this rank's client, with `share_fetch`; all ranks have agreed on their plan (`plan_check`).
            shared: with whom it may share.
            groups: over gloo, by their ranks. Nothing else uses them: all ranks of one begin the same views in the same
                order, at whatever moments.
            pin: whether to take into page-locked memory.
        """
        self._batches = batches
        self._shared = shared
        self._groups = groups
        self._pin = pin

    @property
    def ready(self) -> bool:
        """Whether the next view is there already; its tensors may still be arriving."""
        return self._batches.ready

    def __next__(self) -> Batch:
        batch = next(self._batches)
        ranks = self._shared.ranks(batch)
        if len(ranks) == 1:
            return batch
        reader = _reader(batch, ranks)
        if batch.withheld != (reader != self._shared.rank):
            raise BrokerMismatchError(
                f"the header of step {batch.step}, microbatch {batch.microbatch} has rank {reader} fetch the view of "
                f"ranks {list(ranks)}, but rank {self._shared.rank} was {'not ' if batch.withheld else ''}sent its "
                "tensors; the servers must run the release of this trainer"
            )
        if not batch.withheld:
            _Arriving.of(batch, ranks, reader, self._groups[ranks])  # gloo keeps the tensors until they are sent
            return batch
        batch = with_room(batch, pin_memory=self._pin)
        return replace(batch, arriving=_Arriving.of(batch, ranks, reader, self._groups[ranks]))


def _reader(batch: Batch, ranks: tuple[int, ...]) -> int:
    """The rank that fetches the view of a group."""
    reader = next(found.reader for found in batch.sequence_parallel_groups if found.ranks == ranks)
    if reader not in ranks:
        raise BrokerMismatchError(
            f"the header of step {batch.step}, microbatch {batch.microbatch} has rank {reader} fetch the view of ranks "
            f"{list(ranks)}, which do not include it; the servers must run the release of this trainer"
        )
    return reader


@dataclass(frozen=True, slots=True, eq=False)
class _Arriving:
    """A view that is being broadcast to its group."""

    reader: int
    wait_s: Tensor
    """float64 [1]: how long the reader waited for it."""
    works: Sequence[dist.Work]
    """Pending broadcasts of the header and of the tensors."""

    @classmethod
    def of(cls, batch: Batch, ranks: tuple[int, ...], reader: int, group: ProcessGroup) -> Self:
        """Begin to broadcast the tensors of a microbatch, or to receive them."""
        wait_s = torch.tensor([batch.wait_s], dtype=torch.float64)
        several = [wait_s, *(t.view(-1).view(torch.uint8) for t in batch.tensors.values() if t.numel())]
        with translate_rank_errors("the ranks of its group"):
            source = ranks.index(reader)
            works = [dist.broadcast(t, group_src=source, group=group, async_op=True) for t in several]
        return cls(reader, wait_s, works)

    def wait(self) -> float:
        """See `Arriving`; RankLostError if a rank of the group is gone."""
        begun = time.perf_counter()
        with translate_rank_errors(f"rank {self.reader} of its module"):
            for work in self.works:
                work.wait()
        return min(time.perf_counter() - begun, self.wait_s.item())
