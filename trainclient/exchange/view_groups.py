"""Groups of processes that work on the same views: tensor-parallel ranks, and ranks that share sequences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trainclient.client import Batch
from trainclient.exchange.message_header import BrokerMismatchError


class ViewGroup(Protocol):
    """Processes that work on the same views, this one among them."""

    @property
    def leader(self) -> int:
        """The global rank of the first one."""

    @property
    def is_leader(self) -> bool:
        """Whether this process is the first one."""

    def broadcast(self, message: Tensor) -> None:
        """Overwrite a tensor with the leader's, of the same shape; a collective."""


class SequenceViewGroup(ViewGroup, Protocol):
    """Ranks that share the rows of a microbatch's sequences: each computes a part of them."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    @property
    def position(self) -> int:
        """This process's position among them."""

    def begin_all_to_all(
        self, values: Tensor, leaving: Sequence[int], arriving: Sequence[int], *, midway: bool = False
    ) -> Callable[[], Tensor]:
        """Begin to send rows to all ranks of the group and to receive theirs; gradients go the other way.

        A collective. Several may run at once.

        Args:
            values: [n, ...], ordered by the rank that gets them.
            leaving: how many rows each rank gets.
            arriving: how many rows each rank has for this one.
            midway: whether all ranks are in the middle of the same computation; otherwise one may still be waiting for
                what it sends.

        Returns:
            Waits for the rows of all ranks, [m, ...], ordered by the rank that had them.
        """


@dataclass(frozen=True, slots=True)
class SharedSequences:
    """The groups in which a process may share the sequences of a microbatch; made once, for all microbatches."""

    rank: int
    """Data-parallel rank of this process within the module."""
    pool: Mapping[tuple[int, ...], SequenceViewGroup]
    """The groups by their ranks; by one rank where its processes share all its microbatches (sp)."""

    @property
    def always(self) -> SequenceViewGroup | None:
        """The group of all microbatches; None where groups change."""
        return self.pool.get((self.rank,))

    def of(self, batch: Batch) -> SequenceViewGroup | None:
        """The group of a microbatch; None where this process has its sequences alone. Errors as in `ranks`."""
        return self.pool.get(self.ranks(batch))

    def ranks(self, batch: Batch) -> tuple[int, ...]:
        """All ranks that share the sequences of a microbatch with this one, itself among them.

        Raises:
            BrokerMismatchError: the plan has a group that no layout of the job has.
        """
        ranks = next((g.ranks for g in batch.sequence_parallel_groups if self.rank in g.ranks), (self.rank,))
        if len(ranks) > 1 and ranks not in self.pool:
            raise BrokerMismatchError(
                f"the plan of step {batch.step} has rank {self.rank} share microbatch {batch.microbatch} with ranks "
                f"{list(ranks)}; groups of this job are runs of {sorted({len(found) for found in self.pool})} ranks "
                "that begin at a multiple of that: all ranks must be started with the job that the servers plan"
            )
        return ranks
